"""THE step: schedule, draft, verify, commit, observe. Read this file first.

One thread calls everything here but `prepare`. `step` is the whole engine; speculation is not a second loop: with k = 0 for every
sequence the same lines decode plainly.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
import weakref
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from headway.config import EngineConfig, SpeculativeConfig
from headway.control.driver import Driver, OpenStep, RowOutcome, StepOutcome
from headway.control.policy import BatchView, Plain, Policy
from headway.control.shadows import Shadows
from headway.drafters.drafter import Committed
from headway.engine import admission, build, cores, prompt_logprobs
from headway.engine.admission import Prepared
from headway.engine.metrics import EngineMetrics
from headway.engine.outputs import TextOutput
from headway.engine.runner import ForwardOutput
from headway.engine.structured.ahead import MasksAhead
from headway.engine.tokenizer import Tokenizer
from headway.errors import InvalidRequestError
from headway.models.decoder import Decoder
from headway.models.generation import sampling_defaults
from headway.models.loader import load_model
from headway.structured_outputs import GrammarError
from headway.telemetry.learned_state import LearnedState
from headway.telemetry.trace import TraceWriter
from headway.types import (
    Choice,
    Draft,
    Feedback,
    OutputDelta,
    Request,
    Row,
    Sequence,
    Status,
    StepPlan,
    Verdict,
)
from headway.version import __version__

logger = logging.getLogger("headway.engine")


@dataclass(slots=True)
class _Clock:
    """Where one step's time went: marks in seconds, taken between the verbs."""

    start: float
    scheduled: float = 0.0
    drafted: float = 0.0
    verified: float = 0.0


class Engine:
    """A model, its K/V cache, and the sequences being written. Raises ConfigError or ModelError when it cannot be built.

    model  loaded from `config.model`, where several engines in one thread share it
    """

    def __init__(self, config: EngineConfig, *, model: Decoder | None = None, progress: bool = False) -> None:
        cores.set_threads(config.num_threads)
        self.config = config
        self.model = model or load_model(
            config.model, dtype=config.dtype, device=config.device, quantization=config.quantization,
            max_model_len=config.max_model_len, lora=config.lora, progress=progress,
        )
        self.tokenizer = Tokenizer(self.model.directory)
        self.sampling_defaults = sampling_defaults(config.model, self.model.config.generation)   # for who asks for none
        self.grammars = build.grammar_compiler(self.tokenizer, self.model.config)
        self.masks = MasksAhead()
        self.requests: dict[str, list[Sequence]] = {}
        self._sequences: dict[int, Sequence] = {}   # live, by seq_id
        self._learned: LearnedState | None = None   # opened for the first policy that needs costs
        self.speculate(config.speculative, progress=progress)
        self.metrics = EngineMetrics()
        self.trace = TraceWriter(config.trace, self._trace_header()) if config.trace else None
        self._texts: dict[int, TextOutput] = {}
        self._prompt_logprobs: dict[str, prompt_logprobs.Collector] = {}
        self._seq_ids = itertools.count()
        self._seeds = random.Random(config.seed)

    def speculate(self, speculative: SpeculativeConfig | None, *, progress: bool = False) -> None:
        """Starts afresh with this way to speculate: new drafters, policy, scheduler and an empty K/V cache around the loaded model.

        Only for an engine without work: a sweep changes the configuration this way without loading the model again.
        """
        assert not self.requests, "the way to speculate can only change while nothing runs"
        self._unload()
        if self._learned is not None:
            self._learned.release()
        parts = build.build(self.config, speculative, self.model, self._sequences, progress)
        self.drafters, self.memory, self.max_model_len = parts.drafters, parts.memory, parts.memory.max_model_len
        self.runner, self.scheduler, self.verifier, self.proposer = parts.runner, parts.scheduler, parts.verifier, parts.proposer
        self.drive(self._start_policy(speculative) if speculative else Plain())

    def drive(self, policy: Policy) -> None:
        """From now on `policy`, which is started already, decides."""
        self.driver = Driver(policy, self.proposer.views, Shadows(self._sequences))

    @property
    def policy(self) -> Policy:
        return self.driver.policy

    # -- requests -------------------------------------------------------------------------------------------------

    def prepare(self, requests: SequenceOf[Request]) -> list[Prepared]:
        """What takes time before `add`, on any thread. Raises InvalidRequestError when one of the requests cannot be served."""
        return admission.prepare(requests, self)

    def add(self, request: Request | Prepared) -> None:
        """Queues a request. Raises InvalidRequestError and changes nothing when it cannot be served."""
        prepared = request if isinstance(request, Prepared) else self.prepare([request])[0]
        request = prepared.request
        if request.request_id in self.requests:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
        seed = request.params.seed if request.params.seed is not None else self._seeds.getrandbits(63)
        sequences = [
            admission.make_sequence(prepared, index, next(self._seq_ids), seed, self) for index in range(request.params.n)
        ]
        texts = [TextOutput(self.tokenizer, seq) for seq in sequences]
        self.requests[request.request_id] = sequences
        if request.params.prompt_logprobs is not None:
            self._prompt_logprobs[request.request_id] = prompt_logprobs.Collector(request)
        for seq, text in zip(sequences, texts, strict=True):
            self._texts[seq.seq_id] = text
            self._sequences[seq.seq_id] = seq
            self.scheduler.add(seq)
        self.metrics.observe_request(request)
        self._observe_load()

    def abort(self, request_id: str) -> None:
        """Drops a request and frees what it held; no further output. Unknown ids are fine: it may have just finished."""
        for seq in self.requests.pop(request_id, []):
            self.scheduler.finish(seq, "abort")
            if seq.seq_id in self._sequences:   # also one that was finished by a step that failed
                self._forget(seq)
        self._prompt_logprobs.pop(request_id, None)
        self.metrics.observe_abort(request_id)
        self._observe_load()

    def has_work(self) -> bool:
        return self.scheduler.has_work()

    def check(self) -> None:
        """Raises AssertionError when an invariant is broken. Callable between any two steps."""
        self.scheduler.check()
        live = {seq.seq_id for seq in (*self.scheduler.waiting, *self.scheduler.running)}
        assert live == set(self._texts), "text outputs and live sequences differ"
        assert live == {s.seq_id for seqs in self.requests.values() for s in seqs if s.status is not Status.FINISHED}

    # -- the step -------------------------------------------------------------------------------------------------

    def step(self) -> list[OutputDelta]:
        """One step over everything that can run; returns what it added to each sequence that wrote."""
        clock = _Clock(time.perf_counter())
        step = self.driver.plan(self.scheduler.view())
        plan = self.scheduler.schedule(step.wishes)
        if not plan.rows:
            return []
        clock.scheduled = time.perf_counter()
        self.scheduler.reserve(plan.rows)
        drafts = self._draft(step, plan.rows)
        clock.drafted = time.perf_counter()
        self.masks.begin(plan.rows, drafts)
        out = self.runner.forward(plan.rows, drafts)
        self.masks.wait()
        verdicts = self._verify(out, plan.rows, drafts)
        clock.verified = time.perf_counter()
        num_prefill_tokens = sum(row.length for row in plan.rows if not row.seq.is_decoding)
        deltas = self._commit(out, plan.rows, drafts, verdicts)
        outcome = self._outcome(plan, drafts, verdicts, clock, out.num_tokens, num_prefill_tokens)
        feedback = self.driver.observe(step, outcome)
        for row in plan.rows:
            if row.seq.status is Status.FINISHED:
                self._forget(row.seq)
        self._report(step.view, plan, feedback, deltas)
        return deltas

    def _draft(self, step: OpenStep, rows: SequenceOf[Row]) -> list[Draft | None]:
        """By row, the draft that is to be verified."""
        if step.wishes or step.shadow_wishes:
            decoding = {row.seq.seq_id: row for row in rows if row.seq.is_decoding}
            granted = {seq_id: Choice(row.drafter, row.k, row.lookups) for seq_id, row in decoding.items()}
            self.driver.draft(step, granted, partial(self.proposer.propose, decoding))
        drafts = self.driver.select(step)
        return [drafts.get(row.seq.seq_id) for row in rows]

    def _verify(self, out: ForwardOutput, rows: SequenceOf[Row], drafts: SequenceOf[Draft | None]) -> list[Verdict | None]:
        """A verdict for each row that samples, None for a prefill chunk that does not reach its end."""
        sampling = [i for i, row in enumerate(rows) if row.samples]
        found = iter(self.verifier.verify(out.logits, [rows[i] for i in sampling], [drafts[i] for i in sampling]))
        return [next(found) if row.samples else None for row in rows]

    def _commit(
        self, out: ForwardOutput, rows: SequenceOf[Row], drafts: SequenceOf[Draft | None], verdicts: SequenceOf[Verdict | None]
    ) -> list[OutputDelta]:
        deltas = []
        written: list[tuple[Row, int, SequenceOf[int], int]] = []   # (row, new tokens, accepted drafts among them, offset in the pass)
        self.runner.compact(rows, verdicts)
        for row, draft, verdict, offset in zip(rows, drafts, verdicts, out.offsets, strict=True):
            seq = row.seq
            num_new = self.scheduler.commit(row, verdict)
            delta: OutputDelta | None = None
            try:
                if seq.request.request_id in self._prompt_logprobs and seq.index == 0:
                    collector = self._prompt_logprobs[seq.request.request_id]
                    collector.observe(row, out.hidden[offset : offset + row.length], self.runner.logits)
                if verdict is not None:
                    delta = self._write(row, draft, verdict, num_new)
                    num_new = len(delta.token_ids)
            except Exception:   # of one sequence: the others go on
                logger.exception("request %s: its output cannot be written; it ends here", seq.request.request_id)
                delta = self._fail(seq)
            if delta is not None:
                deltas.append(delta)
            if self.drafters:
                written.append((row, num_new, verdict.accepted(num_new) if verdict else range(0), offset))
        alike: list[Committed] | None = None   # for drafters that want no hidden states
        for drafter in self.drafters.values():
            if drafter.hidden_layers:
                layers = [out.layers[self.runner.hidden_layers.index(layer)] for layer in drafter.hidden_layers]
                drafter.commit([_committed(*what, layers) for what in written])
            elif drafter.reads_commits:
                alike = alike if alike is not None else [_committed(*what, ()) for what in written]
                drafter.commit(alike)
        return deltas

    def _write(self, row: Row, draft: Draft | None, verdict: Verdict, num_committed: int) -> OutputDelta:
        """Tokens -> text; a stop string ends the sequence at the token that completes it. Raises GrammarError."""
        seq = row.seq
        if seq.matcher is not None and seq.matcher.error is not None:
            raise GrammarError(seq.matcher.error)
        text_output = self._texts[seq.seq_id]
        tokens = verdict.tokens[:num_committed]
        # The token that ended the sequence belongs to its ids, not to its text. (The last one of a complete grammar is text.)
        ended_by_token = seq.finish_reason == "stop" and (tokens[-1] in seq.eos_token_ids or tokens[-1] in seq.stop_token_ids)
        hide_last = ended_by_token and not seq.params.include_stop_str_in_output
        text, num_shown = text_output.push(tokens[:-1] if hide_last else tokens)
        if text_output.stopped_by is not None:
            del seq.token_ids[len(seq.token_ids) - (len(tokens) - num_shown) :]
            tokens = tokens[:num_shown]
            self.scheduler.finish(seq, "stop", text_output.stopped_by)
        elif seq.status is Status.FINISHED:
            text += text_output.flush()
        num_accepted, accepted = min(verdict.num_accepted, len(tokens)), verdict.accepted(len(verdict.tokens))
        seq.stats.observe(len(draft) if draft else 0, num_accepted, draft.depth if draft else 0)
        delta = OutputDelta(
            seq.request.request_id,
            seq.index,
            tokens,
            [position < num_accepted for position in range(len(tokens))],
            text,
            verdict.logprobs[: len(tokens)] if verdict.logprobs is not None else None,
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            num_cached=seq.num_cached,
            stats=seq.stats if seq.status is Status.FINISHED else None,
            rejected=[] if draft is None else [t for node, t in enumerate(draft.tokens) if node not in accepted],
        )
        if seq.num_output_tokens == len(tokens) and seq.request.request_id in self._prompt_logprobs:
            delta.prompt_logprobs = self._prompt_logprobs[seq.request.request_id].result() if seq.index == 0 else None
        return delta

    def _fail(self, seq: Sequence) -> OutputDelta:
        """Ends a sequence whose output cannot be written, whether or not its last token has just ended it."""
        self.scheduler.finish(seq, "error")
        return OutputDelta(seq.request.request_id, seq.index, [], [], finish_reason="error", num_cached=seq.num_cached, stats=seq.stats)

    def _outcome(
        self, plan: StepPlan, drafts: SequenceOf[Draft | None], verdicts: SequenceOf[Verdict | None], clock: _Clock, num_tokens: int,
        num_prefill_tokens: int,
    ) -> StepOutcome:
        return StepOutcome(
            step=self.scheduler.num_steps,
            rows=[
                RowOutcome(row.seq.seq_id, row.start + row.length, len(draft) if draft else 0, verdict.num_accepted, verdict.path)
                for row, draft, verdict in zip(plan.rows, drafts, verdicts, strict=True)
                if verdict is not None
            ],
            num_tokens=num_tokens,
            num_prefill_tokens=num_prefill_tokens,
            num_context_tokens=sum(row.start + row.length for row in plan.rows),
            num_rows=len(plan.rows),
            num_waiting=plan.num_waiting,
            draft_ms=(clock.drafted - clock.scheduled) * 1e3,
            verify_ms=(clock.verified - clock.drafted) * 1e3,
            step_ms=(time.perf_counter() - clock.start) * 1e3,
            finished=[row.seq.seq_id for row in plan.rows if row.seq.status is Status.FINISHED],
        )

    def _report(self, view: BatchView, plan: StepPlan, feedback: Feedback, deltas: list[OutputDelta]) -> None:
        """The step in counters, statistics of requests and trace."""
        self.metrics.observe_step(feedback, deltas, len(plan.preempted))
        if feedback.forecast and feedback.num_prefill_tokens == 0:
            for row, seq in zip(plan.rows, feedback.sequences, strict=True):
                row.seq.stats.compare(feedback.step_ms, feedback.forecast.plain_ms, seq.num_accepted)
        if self.trace:
            self.trace.write(view, feedback)
        self._observe_load()
        if self._learned is not None and not self.scheduler.has_work():
            self._learned.save_now_and_then(idle=True)

    # -- inside ---------------------------------------------------------------------------------------------------

    def _trace_header(self) -> dict[str, Any]:
        speculative = self.config.speculative
        return {
            "engine": f"headway {__version__}",
            "model": self.config.model,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": str(self.model.device),
            "drafters": list(self.drafters),
            "drafter_options": {name: speculative.spelled_out(name) for name in self.drafters} if speculative else {},
            "policy": speculative.policy if speculative else None,
            "max_k": self.scheduler.max_k,
            "max_num_seqs": self.config.max_num_seqs,
            "max_num_batched_tokens": self.config.max_num_batched_tokens,
        }

    def _start_policy(self, speculative: SpeculativeConfig) -> Policy:
        if self.config.profile and speculative.build_policy().needs_costs and self._learned is None:
            self._learned = build.open_learned(self)
            weakref.finalize(self, self._learned.save)
        return build.build_policy(self, speculative, self._learned)

    def _unload(self) -> None:
        """Gives back what `speculate` is about to plan anew."""
        self.drafters = {}
        if hasattr(self, "runner"):
            del self.runner
            if self.model.device.type == "cuda":
                torch.cuda.empty_cache()

    def _forget(self, seq: Sequence) -> None:
        del self._texts[seq.seq_id], self._sequences[seq.seq_id]
        self.driver.stop(seq.seq_id)
        self.proposer.stop(seq.seq_id)
        request_id = seq.request.request_id
        if all(s.status is Status.FINISHED for s in self.requests.get(request_id, ())):
            self.requests.pop(request_id, None)
            self._prompt_logprobs.pop(request_id, None)

    def _observe_load(self) -> None:
        pool = self.scheduler.pool
        self.metrics.observe_load(len(self.scheduler.running), len(self.scheduler.waiting), pool.usage)
        self.metrics.observe_prefix_cache(pool.num_queried_tokens, pool.num_hit_tokens)


def _committed(row: Row, num_new: int, accepted: SequenceOf[int], offset: int, layers: SequenceOf[Tensor]) -> Committed:
    seq, end = row.seq, offset + row.length
    hidden: tuple[Tensor, ...]
    if isinstance(accepted, range):
        hidden = tuple(layer[offset : end + len(accepted)] for layer in layers)
    else:
        nodes = [*range(offset, end), *(end + node for node in accepted)]
        hidden = tuple(layer[nodes] for layer in layers)
    return Committed(
        seq.seq_id, seq.token_ids, seq.num_prompt_tokens, num_new, len(accepted), row.start, hidden or None, seq.block_table, seq.salt
    )
