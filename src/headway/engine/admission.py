"""What a request must satisfy before it enters, and the sequences it becomes."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from headway.engine.parts import EngineParts
from headway.engine.structured.grammar import CompiledGrammar
from headway.errors import InvalidRequestError
from headway.types import Request, Sequence


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be served, and what all of its sequences share: what takes time and needs nothing of the engine's state.

    bad_words_token_ids  token sequences that no continuation may write
    grammar              of the form that the text must have
    """

    request: Request
    bad_words_token_ids: tuple[tuple[int, ...], ...]
    grammar: CompiledGrammar | None = None


def prepare(requests: SequenceOf[Request], engine: EngineParts) -> list[Prepared]:
    """Checks requests and compiles their parameters, each once, on any thread.

    Raises InvalidRequestError when the engine could not serve all of them to their end.
    """
    bad_words: dict[int, tuple[tuple[int, ...], ...]] = {}
    grammars: dict[int, CompiledGrammar] = {}
    for request in requests:
        _validate(request, engine)
    for params in {id(request.params): request.params for request in requests}.values():
        bad_words[id(params)] = engine.tokenizer.bad_words_ids(params.bad_words or ())
        if params.structured_outputs is not None:
            grammars[id(params)] = engine.grammars.compile(params.structured_outputs)
    return [Prepared(request, bad_words[id(request.params)], grammars.get(id(request.params))) for request in requests]


def _validate(request: Request, engine: EngineParts) -> None:
    num_prompt, longest = len(request.prompt_token_ids), engine.max_model_len
    vocab_size = engine.model.config.vocab_size
    params = request.params
    if num_prompt == 0:
        raise InvalidRequestError("the prompt is empty: at least one token is needed", param="prompt")
    if num_prompt >= longest:
        raise _too_long(f"the prompt has {num_prompt} tokens", longest)
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


def check_length(text: str, engine: EngineParts) -> None:
    """Raises InvalidRequestError for a prompt that cannot fit the context, without tokenizing it: that would take long for nothing."""
    at_least, longest = engine.tokenizer.min_num_tokens(text), engine.max_model_len
    if at_least >= longest:
        raise _too_long(f"the prompt has at least {at_least} tokens, by its length", longest)


def _too_long(what: str, longest: int) -> InvalidRequestError:
    return InvalidRequestError(
        f"{what}; the longest accepted is {longest - 1} (context of {longest} less one to write)",
        param="prompt",
        code="context_length_exceeded",
    )


def make_sequence(prepared: Prepared, index: int, seq_id: int, seed: int, engine: EngineParts) -> Sequence:
    """The `index`-th continuation of a request, every open value resolved."""
    request, params = prepared.request, prepared.request.params
    num_prompt = len(request.prompt_token_ids)
    eos_token_ids = frozenset() if params.ignore_eos else engine.model.config.eos_token_ids
    return Sequence(
        seq_id=seq_id,
        request=request,
        index=index,
        seed=(seed + index) & (2**64 - 1),
        eos_token_ids=eos_token_ids,
        stop_token_ids=frozenset(params.stop_token_ids or ()),
        bad_words_token_ids=prepared.bad_words_token_ids,
        max_tokens=params.max_tokens if params.max_tokens is not None else engine.max_model_len - num_prompt,
        token_ids=list(request.prompt_token_ids),
        num_prompt_tokens=num_prompt,
        matcher=prepared.grammar.matcher(eos_token_ids) if prepared.grammar is not None else None,
    )
