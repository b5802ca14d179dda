"""What the API accepts and answers, as pydantic models: OpenAI's fields, vLLM's extra ones, and "speculative".

A field that is not honoured is refused, never ignored: unknown names are errors, and the OpenAI fields declared `Unsupported` take
null only. null stands for "the default" in every optional field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from headway.errors import InvalidRequestError
from headway.sampling_params import MAX_LIST, MAX_STOP_STRINGS, MAX_STRING_LENGTH, RequestSpeculation, SamplingParams
from headway.server.text_form import Strict, Strings, Text, Unsupported, WithForm, accepts

INT32_MAX = 2**31 - 1
INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_N = 128
MAX_MESSAGES = 2048     # OpenAI's bound; of the text parts of a message, too
MAX_SALT_LENGTH = 256   # characters; it is hashed for each sequence

TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
# One wrong element is enough: a megabyte of them must not become a million errors.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
ListedTokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_LIST)]
ShortText = Annotated[str, Field(min_length=1, max_length=MAX_STRING_LENGTH)]
StopStrings = Annotated[list[ShortText], Field(fail_fast=True, max_length=MAX_STOP_STRINGS)]
BadWords = Annotated[list[ShortText], Field(fail_fast=True, max_length=MAX_LIST)]
ListOfTokenIds = Annotated[list[TokenIds], Field(fail_fast=True)]
TOKEN_ID_PATTERN = "^[0-9]{1,10}$"
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=TOKEN_ID_PATTERN)], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_LIST),
    WithJsonSchema(
        {
            "type": "object",
            "patternProperties": {TOKEN_ID_PATTERN: {"type": "number", "minimum": -100, "maximum": 100}},
            "additionalProperties": False,
            "maxProperties": MAX_LIST,
        }
    ),
]


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="a last chunk with the usage of the whole request")
    continuous_usage_stats: bool | None = Field(None, description="usage so far in every chunk")


class Speculation(Strict):
    """How this request is speculated on; the server's own settings are the upper bound."""

    enabled: bool | None = Field(None, description="false: plain decoding for this request")
    max_tokens: int | None = Field(None, ge=0, le=INT32_MAX, description="at most so many drafts per step")
    tpot_slo_ms: float | None = Field(
        None, gt=0, le=1e9, description="milliseconds per output token to keep to, where that is possible (policy goodput)"
    )


class _Sampling(WithForm):
    """Fields that both completions endpoints share. Defaults are vLLM's: the model's own for sampling, where its makers recommend any."""

    model: str | None = Field(None, description="the served model's name")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_N)
    seed: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX)
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX)
    stop: ShortText | StopStrings | None = Field(None, json_schema_extra=accepts(
        f"a string of 1 to {MAX_STRING_LENGTH} characters, an array of at most {MAX_STOP_STRINGS} of them, or null"
    ))  # fmt: skip
    temperature: float | None = Field(None, ge=0, le=1000)
    top_p: float | None = Field(None, gt=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = Field(None, description="token id -> added to its logit")
    user: str | None = Field(None, description="the caller's own note; it has no effect")
    # vLLM's
    top_k: int | None = Field(None, ge=-1, le=INT32_MAX)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.001, le=1000)
    stop_token_ids: ListedTokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0, le=INT32_MAX)
    bad_words: BadWords | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=20, description="not together with stream")
    priority: int | None = Field(None, ge=INT64_MIN, le=INT64_MAX, description="smaller runs first")
    cache_salt: Text | None = Field(
        None, max_length=MAX_SALT_LENGTH, description="K/V prefixes and remembered responses are shared with the same salt only"
    )
    # Headway's
    speculative: Speculation | None = None

    def _params(self, defaults: Mapping[str, Any], **given: Any) -> SamplingParams:
        """SamplingParams of the fields that were given, over the model's `defaults`; `given` overrides both. Raises InvalidRequestError."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options needs stream: true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError("prompt_logprobs cannot be streamed", param="prompt_logprobs")
        values = {name: getattr(self, name) for name in _SAMPLING_NAMES}
        values["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()} if self.logit_bias is not None else None
        if self.speculative is not None:
            enabled = self.speculative.enabled
            values["speculative"] = RequestSpeculation(
                True if enabled is None else enabled, self.speculative.max_tokens, self.speculative.tpot_slo_ms
            )
        values["structured_outputs"] = self.form()
        return SamplingParams(**{**defaults, **{name: value for name, value in values.items() if value is not None}, **given})


_SAMPLING_NAMES = (
    "n", "seed", "stop", "temperature", "top_p", "frequency_penalty", "presence_penalty", "top_k", "min_p", "repetition_penalty",
    "stop_token_ids", "ignore_eos", "min_tokens", "bad_words", "include_stop_str_in_output", "skip_special_tokens", "prompt_logprobs",
)  # fmt: skip


class CompletionRequest(_Sampling):
    prompt: str | Strings | TokenIds | ListOfTokenIds = Field(
        json_schema_extra=accepts("a string, an array of strings, an array of token ids, or an array of arrays of token ids")
    )
    max_tokens: int | None = Field(16, ge=1, le=INT32_MAX, description="null: up to the context limit")
    logprobs: int | None = Field(None, ge=0, le=20, description="log probabilities of so many most likely tokens")
    echo: Literal[False] | None = Field(None, description="true is not supported")
    suffix: Unsupported = None
    best_of: Unsupported = None

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one continuation each (times n). Raises InvalidRequestError when there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequestError("prompt must not be an empty array", param="prompt")
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        return self._params(defaults, max_tokens=self.max_tokens, logprobs=self.logprobs)


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """One message; the null-only fields are those that OpenAI's own answers carry."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    name: Unsupported = None
    refusal: Unsupported = None
    tool_calls: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    annotations: Unsupported = None

    def flat(self) -> dict[str, str]:
        """As a chat template takes it: text parts joined, `developer` by its older name."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class ChatCompletionRequest(_Sampling):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX, description="null: up to the context limit")
    max_completion_tokens: int | None = Field(None, ge=1, le=INT32_MAX, description="the newer name of max_tokens")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20, description="needs logprobs: true")
    tools: Unsupported = None
    tool_choice: Unsupported = None
    functions: Unsupported = None
    function_call: Unsupported = None

    def sampling_params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise InvalidRequestError("max_tokens and max_completion_tokens differ: give one of them", param="max_completion_tokens")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._params(defaults, max_tokens=limits.pop() if limits else None, logprobs=logprobs)


class TokenizeRequest(Strict):
    """Either a text (`prompt`) or a conversation (`messages`)."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = Field(None, description="with prompt only; default true")
    add_generation_prompt: bool | None = Field(None, description="with messages only; default true")
    return_token_strs: bool | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: TokenIds


# Answers. They are written as plain dicts; these models document them, and tests hold the two together.


class _Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorInfo(_Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(_Answer):
    error: ErrorInfo


class PromptTokensDetails(_Answer):
    cached_tokens: int


class CompletionTokensDetails(_Answer):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(_Answer):
    """rejected_prediction_tokens are not part of completion_tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SpeculativeDecoding(_Answer):
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_steps: int
    num_rejected_tokens: int
    num_steps_per_k: list[int]
    conditional_acceptance: list[float]
    compared_ms: float
    plain_equivalent_ms: float


class RequestMetrics(_Answer):
    speculative_decoding: SpeculativeDecoding


class PromptLogprob(_Answer):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
FinishReason = Literal["stop", "length", "abort"]


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(_Answer):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    prompt_logprobs: PromptLogprobs | None = None


class CompletionResponse(_Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class TopLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    content: list[TokenLogprob]
    refusal: None


class AssistantMessage(_Answer):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(_Answer):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | None


class ChatCompletionResponse(_Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    metrics: RequestMetrics
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(_Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


class ChatCompletionChunk(_Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    metrics: RequestMetrics | None = None


class ModelCard(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class ModelList(_Answer):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeResponse(_Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeResponse(_Answer):
    prompt: str


class Health(_Answer):
    status: Literal["ok"]


class Version(_Answer):
    version: str
