"""Flags of SamplingParams: vLLM's names; a command may have defaults of its own for length and temperature."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from headway.cli.flags import add_fields
from headway.errors import InvalidRequestError
from headway.sampling_params import SamplingParams

HELPS = {
    "presence_penalty": "subtracted from the logit of every token already written, -2 to 2",
    "frequency_penalty": "the same, once per time the token was written",
    "repetition_penalty": "divides the logits of tokens in prompt and output; 1: off",
    "temperature": "0: greedy",
    "top_p": "sample from the smallest set of tokens with this total probability",
    "top_k": "sample from the k most likely tokens; 0: all",
    "min_p": "drop tokens less likely than this times the most likely one",
    "stop": "stop before this text; may be repeated",
    "stop_token_ids": "stop at this token id; may be repeated",
    "ignore_eos": "go on after the end-of-text token",
    "max_tokens": "most tokens to write",
    "min_tokens": "fewest tokens before a stop is honoured",
    "skip_special_tokens": "leave special tokens out of the text",
    "include_stop_str_in_output": "end the text with the stop text that ended it",
    "logit_bias": 'added to logits before sampling, such as {"42": -100}',
    "bad_words": "never write this text; may be repeated",
}


def add_sampling_arguments(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    """One flag per field that makes sense for one continuation shown as text; `defaults` as in `sampling_params`."""
    # --seed is the engine's: it seeds the requests that bring none, and with one request that is the same thing.
    skip = [f.name for f in dataclasses.fields(SamplingParams) if f.name not in HELPS]
    add_fields(parser.add_argument_group("sampling"), SamplingParams, skip=skip, helps=HELPS, defaults=defaults)


def sampling_params(args: argparse.Namespace, defaults: Mapping[str, Any]) -> SamplingParams:
    """The flags over the command's own defaults. Raises InvalidRequestError for a value out of range."""
    names = {f.name for f in dataclasses.fields(SamplingParams)}
    given: dict[str, Any] = {**defaults, **{name: value for name, value in vars(args).items() if name in names}}
    if "logit_bias" in given:
        given["logit_bias"] = _token_ids(given["logit_bias"])
    return SamplingParams(**given)


def _token_ids(bias: Any) -> dict[int, float]:
    try:
        return {int(key): float(value) for key, value in bias.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidRequestError(f'logit_bias must be a JSON object such as {{"42": -100}}, token id -> number, got {bias!r}') from error
