"""What a request must satisfy before it enters, and the sequences it becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway.errors import InvalidRequestError
from headway.types import Request, Sequence

if TYPE_CHECKING:
    from headway.engine.engine import Engine


def validate(request: Request, engine: Engine) -> None:
    """Raises InvalidRequestError when the engine could not serve this request to its end."""
    num_prompt, longest = len(request.prompt_token_ids), engine.max_model_len
    vocab_size = engine.model.config.vocab_size
    params = request.params
    if request.request_id in engine.requests:
        raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
    if num_prompt == 0:
        raise InvalidRequestError("the prompt is empty: at least one token is needed", param="prompt")
    if num_prompt >= longest:
        raise InvalidRequestError(
            f"the prompt has {num_prompt} tokens; the longest accepted is {longest - 1} (context of {longest} less one to write)",
            param="prompt",
            code="context_length_exceeded",
        )
    if params.max_tokens is not None and num_prompt + params.max_tokens > longest:
        raise InvalidRequestError(
            f"prompt ({num_prompt} tokens) plus max_tokens ({params.max_tokens}) exceed the context of {longest} tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    for name, token_ids in (
        ("prompt", request.prompt_token_ids),
        ("stop_token_ids", params.stop_token_ids or ()),
        ("logit_bias", params.logit_bias or ()),
    ):
        wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(f"{name} holds token id {wrong}; accepted are 0 to {vocab_size - 1}", param=name)


def make_sequence(request: Request, index: int, seq_id: int, seed: int, engine: Engine) -> Sequence:
    """The `index`-th continuation of a validated request, every open value resolved."""
    params = request.params
    num_prompt = len(request.prompt_token_ids)
    return Sequence(
        seq_id=seq_id,
        request=request,
        index=index,
        seed=(seed + index) & (2**64 - 1),
        eos_token_ids=frozenset() if params.ignore_eos else engine.model.config.eos_token_ids,
        stop_token_ids=frozenset(params.stop_token_ids or ()),
        bad_words_token_ids=engine.tokenizer.bad_words_ids(params.bad_words or ()),
        max_tokens=params.max_tokens if params.max_tokens is not None else engine.max_model_len - num_prompt,
        token_ids=list(request.prompt_token_ids),
        num_prompt_tokens=num_prompt,
    )
