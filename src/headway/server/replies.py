"""From deltas to the JSON of an answer, whole or in chunks. Plain strings and dicts: nothing is validated per chunk.

One `Reply` belongs to one HTTP request. Its choices are numbered prompt by prompt: choice = position of the prompt * n + index.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from headway.server.writing import Mapped, text_of
from headway.spec_decode_metrics import SpecDecodeMetrics
from headway.types import OutputDelta, TokenLogprobs

LOWEST_LOGPROB = -9999.0   # JSON has no -inf
_quote = json.encoder.encode_basestring_ascii   # json.dumps of a string, without its way there


class TokenNames:
    """A token alone as text and as bytes, remembered: answers with log probabilities ask for the same ones again and again."""

    def __init__(self, text: Callable[[int], str], raw: Callable[[int], bytes]) -> None:
        self._text, self._raw = text, raw
        self._known: dict[int, tuple[str, list[int]]] = {}

    def __call__(self, token_id: int) -> tuple[str, list[int]]:
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = (self._text(token_id), list(self._raw(token_id)))
        return known


class Reply:
    """The part that both completions endpoints share. Subclasses say how a choice and a chunk look."""

    id_prefix = object_name = chunk_object_name = after_text = ""

    def __init__(
        self, model: str, names: TokenNames, prompts: Sequence[Sequence[int]], n: int, logprobs: int | None, stream_usage: tuple[bool, bool]
    ) -> None:
        """logprobs: most likely tokens to show, None: no log probabilities; stream_usage: (at the end, in every chunk)."""
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self.model = model
        self.names = names
        self.num_prompts = len(prompts)
        self.n = n
        self.logprobs = logprobs
        self.usage_at_end, self.usage_in_chunks = stream_usage
        self.created = int(time.time())
        self.num_prompt_tokens = sum(map(len, prompts))
        self.num_completion_tokens = 0
        self.num_cached_tokens = 0
        self.stats = SpecDecodeMetrics()
        self._first_seen: set[int] = set()
        head = {"id": self.id, "object": self.chunk_object_name, "created": self.created, "model": model}
        self._head = json.dumps(head)[:-1]
        self._tail = ', "usage": null}\n\n' if self.usage_at_end else "}\n\n"
        self._around_text: dict[int, tuple[str, str]] = {}   # choice -> what stands before and after the text of a plain chunk

    @property
    def num_choices(self) -> int:
        return self.num_prompts * self.n

    def count(self, position: int, delta: OutputDelta) -> int:
        """Adds a delta to the usage; returns its choice."""
        choice = position * self.n + delta.index
        self.num_completion_tokens += len(delta.token_ids)
        if choice not in self._first_seen:
            self._first_seen.add(choice)
            if delta.index == 0:
                self.num_cached_tokens += delta.num_cached
        if delta.stats is not None:
            self.stats.add(delta.stats)
        return choice

    def usage(self) -> dict[str, Any]:
        accepted = self.stats.num_accepted_tokens
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_completion_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": self.stats.num_draft_tokens - accepted,
            },
        }

    def metrics(self) -> dict[str, Any]:
        return {"speculative_decoding": _metrics(self.stats)}

    def whole(self, deltas: Sequence[Sequence[OutputDelta]]) -> dict[str, Any]:
        """The answer, for `writing.pieces`. deltas: per choice."""
        return {
            "id": self.id,
            "object": self.object_name,
            "created": self.created,
            "model": self.model,
            "choices": [self.choice(index, parts) for index, parts in enumerate(deltas)],
            "usage": self.usage(),
            "metrics": self.metrics(),
        }

    def chunk(self, position: int, delta: OutputDelta) -> str:
        """The server-sent event of one delta; "" when it has nothing to show yet (text held back, half a character)."""
        choice = self.count(position, delta)
        if delta.finish_reason is None and self.logprobs is None:
            if not delta.text:
                return ""
            if choice in self._around_text:
                before, after = self._around_text[choice]
                return before + _quote(delta.text) + after
        tail = self._tail
        if self.usage_in_chunks:
            tail = f', "usage": {json.dumps(self.usage())}}}\n\n'
        elif self.logprobs is None:
            self._around_text[choice] = (f"data: {self._head}, {self.before_text(choice)}", f"{self.after_text}{tail}")
        return f"data: {self._head}, {self.chunk_choices(choice, delta)}{tail}"

    def last_chunks(self) -> str:
        """What follows the last delta."""
        if not self.usage_at_end:
            return "data: [DONE]\n\n"
        rest = json.dumps({"choices": [], "usage": self.usage(), "metrics": self.metrics()})
        return f"data: {self._head}, {rest[1:]}\n\ndata: [DONE]\n\n"

    def choice(self, index: int, deltas: Sequence[OutputDelta]) -> dict[str, Any]:
        raise NotImplementedError

    def chunk_choices(self, choice: int, delta: OutputDelta) -> str:
        """`"choices": [...]` of a chunk, as JSON."""
        raise NotImplementedError

    def before_text(self, choice: int) -> str:
        """What `chunk_choices` writes before the text of a chunk that carries nothing else (`after_text`: what after it)."""
        raise NotImplementedError

    def prompt_logprobs(self, deltas: Sequence[OutputDelta]) -> Mapped | None:
        """vLLM's shape: per prompt token {token id: {logprob, rank, decoded_token}}, null for the first."""
        found = next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None), None)
        return None if found is None else Mapped(found, self._ranked)

    def _ranked(self, at: TokenLogprobs | None) -> dict[str, Any] | None:
        if at is None:
            return None
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(at.top, start=1)}
        ranked[at.token_id] = (at.logprob, at.rank)
        return {
            str(token): {"logprob": max(logprob, LOWEST_LOGPROB), "rank": rank, "decoded_token": self.names(token)[0]}
            for token, (logprob, rank) in ranked.items()
        }


def _ending(delta: OutputDelta) -> str:
    return f'"finish_reason": {json.dumps(delta.finish_reason)}, "stop_reason": {json.dumps(delta.stop_reason)}}}]'


class CompletionReply(Reply):
    id_prefix, object_name, chunk_object_name = "cmpl", "text_completion", "text_completion"
    after_text = ', "logprobs": null, "finish_reason": null, "stop_reason": null}]'

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offsets = [0] * self.num_choices

    def choice(self, index: int, deltas: Sequence[OutputDelta]) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": "".join(delta.text for delta in deltas),
            "logprobs": self._logprobs(index, [at for delta in deltas for at in delta.logprobs or ()]),
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }
        prompt_logprobs = self.prompt_logprobs(deltas)
        return choice if prompt_logprobs is None else choice | {"prompt_logprobs": prompt_logprobs}

    def chunk_choices(self, choice: int, delta: OutputDelta) -> str:
        text = _quote(delta.text)
        if delta.finish_reason is None and self.logprobs is None:
            return f"{self.before_text(choice)}{text}{self.after_text}"
        logprobs = text_of(self._logprobs(choice, delta.logprobs or []))
        return f'"choices": [{{"index": {choice}, "text": {text}, "logprobs": {logprobs}, {_ending(delta)}'

    def before_text(self, choice: int) -> str:
        return f'"choices": [{{"index": {choice}, "text": '

    def _logprobs(self, choice: int, found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """OpenAI's parallel lists. Offsets count the characters of the tokens, each decoded alone."""
        if self.logprobs is None:
            return None
        tokens = [self.names(at.token_id)[0] for at in found]
        offsets = list(accumulate(map(len, tokens), initial=self._offsets[choice]))
        self._offsets[choice] = offsets.pop()
        return {
            "tokens": tokens,
            "token_logprobs": [max(at.logprob, LOWEST_LOGPROB) for at in found],
            "top_logprobs": Mapped(found, self._alternatives),
            "text_offset": offsets,
        }

    def _alternatives(self, at: TokenLogprobs) -> dict[str, float]:
        top = {self.names(token)[0]: max(logprob, LOWEST_LOGPROB) for token, logprob in reversed(at.top)}
        top[self.names(at.token_id)[0]] = max(at.logprob, LOWEST_LOGPROB)
        return top


class ChatReply(Reply):
    id_prefix, object_name, chunk_object_name = "chatcmpl", "chat.completion", "chat.completion.chunk"
    after_text = '}, "logprobs": null, "finish_reason": null}]'

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._greeted: set[int] = set()

    def whole(self, deltas: Sequence[Sequence[OutputDelta]]) -> dict[str, Any]:
        reply = super().whole(deltas)
        prompt_logprobs = self.prompt_logprobs(deltas[0])
        return reply if prompt_logprobs is None else reply | {"prompt_logprobs": prompt_logprobs}

    def choice(self, index: int, deltas: Sequence[OutputDelta]) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": "".join(delta.text for delta in deltas), "refusal": None},
            "logprobs": self._logprobs([at for delta in deltas for at in delta.logprobs or ()]),
            "finish_reason": deltas[-1].finish_reason,
            "stop_reason": deltas[-1].stop_reason,
        }

    def chunk_choices(self, choice: int, delta: OutputDelta) -> str:
        text = _quote(delta.text)
        shown = f'"content": {text}'
        if choice not in self._greeted:
            self._greeted.add(choice)
            shown = f'"role": "assistant", {shown}'
        elif delta.finish_reason is None and self.logprobs is None:
            return f"{self.before_text(choice)}{text}{self.after_text}"
        if delta.finish_reason is None and self.logprobs is None:
            return f'"choices": [{{"index": {choice}, "delta": {{{shown}{self.after_text}'
        logprobs = text_of(self._logprobs(delta.logprobs or []))
        return f'"choices": [{{"index": {choice}, "delta": {{{shown}}}, "logprobs": {logprobs}, {_ending(delta)}'

    def before_text(self, choice: int) -> str:
        return f'"choices": [{{"index": {choice}, "delta": {{"content": '

    def _logprobs(self, found: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        if self.logprobs is None:
            return None
        return {"content": Mapped(found, self._with_alternatives), "refusal": None}

    def _with_alternatives(self, at: TokenLogprobs) -> dict[str, Any]:
        alternatives = [self._entry(token, logprob) for token, logprob in at.top[: self.logprobs]]
        return self._entry(at.token_id, at.logprob) | {"top_logprobs": alternatives}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, raw = self.names(token_id)
        return {"token": text, "logprob": max(logprob, LOWEST_LOGPROB), "bytes": raw}


def _metrics(stats: SpecDecodeMetrics) -> dict[str, Any]:
    """The `metrics.speculative_decoding` object of a response: vLLM's keys, then ours."""
    return {
        "num_spec_steps": stats.num_spec_steps,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_accepted_tokens": stats.num_accepted_tokens,
        "mean_acceptance_length": round(stats.mean_acceptance_length, 4),
        "draft_acceptance_rate": round(stats.draft_acceptance_rate, 4),
        "acceptance_histogram": list(stats.acceptance_histogram),
        "num_steps": stats.num_steps,
        "num_rejected_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
        "num_steps_per_k": list(stats.num_steps_per_k),
        "conditional_acceptance": [round(rate, 4) for rate in stats.conditional_acceptance],
        "compared_ms": round(stats.compared_ms, 3),
        "plain_equivalent_ms": round(stats.plain_equivalent_ms, 3),
    }
