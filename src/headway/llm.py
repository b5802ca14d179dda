"""The offline API, shaped like vLLM's: swapping the import line of a vLLM script works for what is supported."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from headway.config import EngineConfig, SpeculativeConfig
from headway.drafters.core.automatic import spell_out
from headway.engine.admission import check_length
from headway.engine.engine import Engine
from headway.engine.tokenizer import Message, Tokenizer
from headway.errors import InvalidRequestError, unknown_key
from headway.sampling_params import SamplingParams
from headway.spec_decode_metrics import SpecDecodeMetrics
from headway.types import OutputDelta, Request, TokenLogprobs

# A mapping has "prompt" or "prompt_token_ids", and may have a "cache_salt": what it leaves in the caches, only prompts with this salt find.
Prompt: TypeAlias = "str | list[int] | Mapping[str, Any]"


@dataclass(slots=True)
class Logprob:
    """One candidate token at one position."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One continuation. `spec_decode_metrics` counts its drafts; `from_draft[i]` says whether token i was one.

    finish_reason  "stop", "length", or "error" when the rest of this one's text could not be written (the log says why)
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    from_draft: list[bool] = field(default_factory=list)
    spec_decode_metrics: SpecDecodeMetrics | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """What `generate` returns for one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    finished: bool = False
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What one step added to a stream: the text, its tokens, and which of them were drafts."""

    text: str
    token_ids: list[int]
    from_draft: list[bool]
    rejected: list[int]
    finish_reason: str | None
    stats: SpecDecodeMetrics | None


class LLM:
    """A model in this process.

    Takes EngineConfig's fields as keywords, and `speculative_config`: vLLM's mapping, "default" (on), "auto", or None (off).
    Raises TypeError for an unknown keyword, ConfigError or ModelError for what cannot work.
    """

    def __init__(self, model: str = "smollm2-135m", *, speculative_config: Any = "default", **options: Any) -> None:
        accepted = {f.name for f in dataclasses.fields(EngineConfig)} - {"model", "speculative"}
        for name in options:
            if name not in accepted:
                raise TypeError(unknown_key("keyword", name, {*accepted, "model", "speculative_config"}))
        speculative, _ = spell_out(speculative_config, model)
        config = EngineConfig(model=model, speculative=SpeculativeConfig.parse(speculative), **options)
        self.engine = Engine(config, progress=sys.stderr.isatty())
        self._request_ids = itertools.count()

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without sampling parameters uses: the model's own recommendation where it has one, as in vLLM."""
        return SamplingParams(**self.engine.sampling_defaults)  # type: ignore[arg-type]

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continues each prompt; outputs come in the order of the prompts.

        Raises InvalidRequestError before anything runs when one of them cannot be served.
        """
        if isinstance(prompts, (str, Mapping)) or (isinstance(prompts, list) and prompts and isinstance(prompts[0], int)):
            prompts = [prompts]
        requests = [self._request(prompt, params) for prompt, params in self._paired(prompts, sampling_params)]
        return self._run(requests, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answers one conversation or a list of them, through the model's chat template."""
        conversations: Sequence[Any] = [messages] if messages and isinstance(messages[0], Mapping) else messages
        prompts = [self.engine.tokenizer.apply_chat_template(turns, add_generation_prompt) for turns in conversations]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[Piece]:
        """Yields what each step adds to one continuation. Closing the iterator aborts the request."""
        request = self._request(prompt, sampling_params or self.get_default_sampling_params())
        if request.params.n != 1:
            raise InvalidRequestError("stream writes one continuation; use generate for n > 1", param="n")
        self.engine.add(request)
        try:
            while self.engine.has_work():
                for delta in self.engine.step():
                    if delta.request_id == request.request_id:
                        yield Piece(delta.text, delta.token_ids, delta.from_draft, delta.rejected, delta.finish_reason, delta.stats)
                        if delta.finished:
                            return
        finally:
            self.engine.abort(request.request_id)

    def _paired(
        self, prompts: Sequence[Any], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Iterator[tuple[Any, SamplingParams]]:
        if params is None or isinstance(params, SamplingParams):
            return zip(prompts, itertools.repeat(params or self.get_default_sampling_params()), strict=False)
        if len(params) != len(prompts):
            raise InvalidRequestError(f"{len(prompts)} prompts but {len(params)} sampling_params: give one, or one each")
        return zip(prompts, params, strict=True)

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        given: Any = prompt
        text: str | None = None
        salt: str | None = None
        if isinstance(given, Mapping):
            salt = given.get("cache_salt")
            if "prompt_token_ids" in given:
                text, given = given.get("prompt"), list(given["prompt_token_ids"])
            elif "prompt" in given:
                given = given["prompt"]
            else:
                raise InvalidRequestError(f'a prompt mapping needs "prompt" or "prompt_token_ids", got {sorted(given)}', param="prompt")
        if isinstance(given, str):
            check_length(given, self.engine)
            text, token_ids = given, self.engine.tokenizer.encode(given)
        else:
            token_ids = list(given)
        return Request(str(next(self._request_ids)), token_ids, params, text, cache_salt=salt)

    def _run(self, requests: list[Request], show_progress: bool) -> list[RequestOutput]:
        added: list[Request] = []
        try:
            for request in requests:
                self.engine.add(request)
                added.append(request)
            results = {r.request_id: _Gather(r, self.engine.tokenizer) for r in requests}
            with _progress(len(requests), show_progress) as advance:
                while self.engine.has_work():
                    for delta in self.engine.step():
                        if results[delta.request_id].take(delta):
                            advance()
        except BaseException:
            for request in added:
                self.engine.abort(request.request_id)
            raise
        return [results[request.request_id].output for request in requests]


class _Gather:
    """Adds up one request's deltas."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        outputs = [CompletionOutput(index) for index in range(request.params.n)]
        self.output = RequestOutput(request.request_id, request.prompt, request.prompt_token_ids, outputs)

    def take(self, delta: OutputDelta) -> bool:
        """True when this delta completes the request."""
        one = self.output.outputs[delta.index]
        one.text += delta.text
        one.token_ids += delta.token_ids
        one.from_draft += delta.from_draft
        if delta.logprobs is not None:
            one.logprobs = one.logprobs or []
            one.logprobs += [self._candidates(entry) for entry in delta.logprobs]
            one.cumulative_logprob = (one.cumulative_logprob or 0.0) + sum(entry.logprob for entry in delta.logprobs)
        if delta.prompt_logprobs is not None:
            self.output.prompt_logprobs = [self._candidates(entry) if entry else None for entry in delta.prompt_logprobs]
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, delta.num_cached)
        one.finish_reason, one.stop_reason, one.spec_decode_metrics = delta.finish_reason, delta.stop_reason, delta.stats
        self.output.finished = all(output.finished() for output in self.output.outputs)
        return self.output.finished

    def _candidates(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        text = self._tokenizer.token_text
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
        for rank, (token_id, logprob) in enumerate(entry.top, start=1):
            found.setdefault(token_id, Logprob(logprob, rank, text(token_id)))
        return found


class _progress:
    """A progress bar on stderr, only where somebody can see it."""

    def __init__(self, total: int, show: bool) -> None:
        self._total = total
        self._bar: Any = None
        self._show = show and sys.stderr.isatty()

    def __enter__(self) -> Any:
        if self._show:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            task = self._bar.add_task("generating", total=self._total)
            return lambda: self._bar.advance(task)
        return lambda: None

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()
