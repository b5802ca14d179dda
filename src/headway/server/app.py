"""The routes. `build_app` makes a FastAPI application around an engine; `headway.server.serve` runs it."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

from fastapi import FastAPI, Security
from fastapi import Request as HttpRequest
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import ValidationError
from starlette.responses import Response

from headway.engine.admission import check_length
from headway.errors import InvalidRequestError
from headway.sampling_params import SamplingParams
from headway.server import access, errors, openapi, protocol
from headway.server.async_engine import STALL_S, AsyncEngine
from headway.server.errors import ApiError, shown
from headway.server.options import ServerOptions
from headway.server.prometheus import EngineCollector, build_registry
from headway.server.replies import ChatReply, CompletionReply, Reply, TokenNames
from headway.server.stream import Stream
from headway.server.streaming import EventStream, JsonInPieces, closing, collect, unless_gone
from headway.server.text_form import Strict
from headway.server.writing import Mapped
from headway.types import Request
from headway.version import __version__

if TYPE_CHECKING:
    from headway.engine.engine import Engine

Body = TypeVar("Body", bound=Strict)
GenerationBody: TypeAlias = "protocol.CompletionRequest | protocol.ChatCompletionRequest"

LONG_TEXT = 4096           # characters from which on tokenizing leaves the loop's thread
MAX_TEXT = 2**20           # bytes that are only tokenized, not answered: a quarter of a second of one thread
MAX_TOKENS = 2**18         # that are only decoded: a tenth of a second in which the interpreter is shared
MESSAGE_LENGTH = 32        # what a message costs a chat template beside its content, in characters
MAX_NUM_ERRORS = 100       # wrong fields beyond which they are only counted
FAILURES = (400, 401, 403, 404, 413, 415)


def build_app(engine: Engine, options: ServerOptions | None = None) -> FastAPI:
    """An application that owns `engine`: its lifespan runs the engine's thread. `app.state.bridge` is the AsyncEngine."""
    api = _Api(engine, options or ServerOptions())
    app = FastAPI(
        title="Headway",
        version=__version__,
        description="OpenAI-compatible API of one model, with speculative decoding.",
        docs_url=None,
        redoc_url=None,
        lifespan=api.lifespan,
        redirect_slashes=False,
    )
    app.state.bridge = api.bridge
    errors.install(app)
    access.install(app, api.options)
    _add_routes(app, api)
    openapi.install(
        app,
        api.model,
        bodies=[protocol.CompletionRequest, protocol.ChatCompletionRequest, protocol.TokenizeRequest, protocol.DetokenizeRequest],
        chunks=[protocol.ChatCompletionChunk],
    )
    return app


def _add_routes(app: FastAPI, api: _Api) -> None:
    secured: dict[str, Any] = {"dependencies": [Security(api.check_key)]} if api.keys else {}
    busy = (*FAILURES, 429, 500, 503)

    def route(method: str, path: str, handler: Any, answer: Any, responses: dict[int | str, dict[str, Any]], **extra: Any) -> None:
        app.add_api_route(
            path, handler, methods=[method], response_model=answer, responses=responses, operation_id=handler.__name__, **extra
        )

    route(
        "POST", "/v1/completions", api.create_completion, protocol.CompletionResponse,
        openapi.failures(*busy) | openapi.event_stream(protocol.CompletionResponse),
        openapi_extra=openapi.body(protocol.CompletionRequest), **secured,
    )  # fmt: skip
    route(
        "POST", "/v1/chat/completions", api.create_chat_completion, protocol.ChatCompletionResponse,
        openapi.failures(*busy) | openapi.event_stream(protocol.ChatCompletionChunk),
        openapi_extra=openapi.body(protocol.ChatCompletionRequest), **secured,
    )  # fmt: skip
    route("GET", "/v1/models", api.list_models, protocol.ModelList, openapi.failures(401, 403), **secured)
    route("GET", "/v1/models/{model_id:path}", api.get_model, protocol.ModelCard, openapi.failures(401, 403, 404), **secured)
    route(
        "POST", "/tokenize", api.tokenize, protocol.TokenizeResponse, openapi.failures(*FAILURES, 429),
        openapi_extra=openapi.body(protocol.TokenizeRequest), **secured,
    )  # fmt: skip
    route(
        "POST", "/detokenize", api.detokenize, protocol.DetokenizeResponse, openapi.failures(*FAILURES, 429),
        openapi_extra=openapi.body(protocol.DetokenizeRequest), **secured,
    )  # fmt: skip
    route("GET", "/health", api.health, protocol.Health, openapi.failures(403, 503))
    route("GET", "/version", api.version, protocol.Version, openapi.failures(403))
    app.add_api_route(
        "/metrics", api.metrics, methods=["GET"], response_class=Response, operation_id="metrics",
        responses=openapi.failures(403)
        | {200: {"description": "Prometheus text", "content": {"text/plain": {"schema": {"type": "string"}}}}},
    )  # fmt: skip


class _Api:
    """The handlers and what they share."""

    def __init__(self, engine: Engine, options: ServerOptions) -> None:
        self.engine = engine
        self.options = options
        self.keys = access.Keys(options.api_key)
        self.model = options.served_model_name or engine.config.model
        self.created = int(time.time())
        max_open, budget = engine.config.max_num_seqs + options.max_queue, engine.config.max_num_batched_tokens
        self.bridge = AsyncEngine(engine, max_open=max_open, max_added_tokens=budget)
        self.names = TokenNames(engine.tokenizer.token_text, engine.tokenizer.token_bytes)
        self.registry = build_registry(EngineCollector(engine.metrics, self.bridge, self.model, engine.config.speculative))

    @contextlib.asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        self.bridge.start()
        yield
        await self.bridge.stop()

    async def check_key(
        self, http: HttpRequest, given: Annotated[HTTPAuthorizationCredentials | None, Security(HTTPBearer(auto_error=False))]
    ) -> None:
        http.state.key_scope = self.keys.scope(given.credentials.encode("latin-1") if given is not None else b"")

    # Generation.

    async def create_completion(self, http: HttpRequest) -> Response:
        """Continues one or several prompts."""
        body = await self._read(http, protocol.CompletionRequest)
        params = body.sampling_params(self.engine.sampling_defaults)
        prompts = body.prompts()
        self._check_size(len(prompts) * params.n)

        async def begin() -> tuple[Stream, Reply]:
            size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
            token_ids = [await self._encode_prompt(prompt, size) if isinstance(prompt, str) else prompt for prompt in prompts]
            reply = CompletionReply(self.model, self.names, token_ids, params.n, params.logprobs, _stream_usage(body))
            return await self._submit(http, body, token_ids, params, reply), reply

        return await self._answer(http, body, begin())

    async def create_chat_completion(self, http: HttpRequest) -> Response:
        """Answers a conversation."""
        body = await self._read(http, protocol.ChatCompletionRequest)
        params = body.sampling_params(self.engine.sampling_defaults)
        self._check_size(params.n)

        async def begin() -> tuple[Stream, Reply]:
            flat = [message.flat() for message in body.messages]
            text = await self._render(self.bridge.aside, flat, _size_of(flat))
            token_ids = [await self._encode_prompt(text, len(text), add_special_tokens=False)]
            reply = ChatReply(self.model, self.names, token_ids, params.n, params.logprobs, _stream_usage(body))
            return await self._submit(http, body, token_ids, params, reply), reply

        try:
            return await self._answer(http, body, begin())
        except InvalidRequestError as error:
            param = "messages" if error.param == "prompt" else error.param
            raise InvalidRequestError(str(error), param=param, code=error.code) from None

    async def _submit(
        self, http: HttpRequest, body: GenerationBody, prompts: Sequence[list[int]], params: SamplingParams, reply: Reply
    ) -> Stream:
        if params.prompt_logprobs is not None:
            self.bridge.memory.check_fits(sum(map(len, prompts)) * (1 + params.prompt_logprobs), "prompt_logprobs")
        # Beside the key's scope, not instead of it: a salt that somebody guesses opens no other key's memory.
        salt = ":".join(filter(None, (getattr(http.state, "key_scope", ""), body.cache_salt))) or None
        requests = [
            Request(f"{reply.id}-{position}", token_ids, params, priority=body.priority or 0, cache_salt=salt)
            for position, token_ids in enumerate(prompts)
        ]
        try:
            return await self.bridge.submit(requests)
        except InvalidRequestError as error:
            param = body.form_field() if error.param == "structured_outputs" else error.param
            raise InvalidRequestError(str(error), param=param, code=error.code) from None

    async def _answer(self, http: HttpRequest, body: GenerationBody, begin: Coroutine[Any, Any, tuple[Stream, Reply]]) -> Response:
        begun = await unless_gone(http.receive, begin)
        if begun is None:
            return _gone()
        stream, reply = begun
        if body.stream:
            return EventStream(stream, reply)
        async with closing(stream, http.receive):
            deltas = await collect(stream, reply)
        return _gone() if deltas is None else JsonInPieces(reply.whole(deltas), held=stream)

    def _check_size(self, num_sequences: int) -> None:
        """Before anything is tokenized: could the queue ever hold so many?"""
        if num_sequences > self.bridge.max_open:
            raise InvalidRequestError(
                f"the request asks for {num_sequences} sequences (prompts times n); at most {self.bridge.max_open} can be queued", param="n"
            )

    # The tokenizer.

    async def tokenize(self, http: HttpRequest) -> Response:
        """Token ids of a text or of a conversation."""
        body = await self._read(http, protocol.TokenizeRequest)
        return await unless_gone(http.receive, self._tokenize(body)) or _gone()

    async def _tokenize(self, body: protocol.TokenizeRequest) -> Response:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequestError("give exactly one of prompt and messages", param="prompt")
        if body.prompt is not None:
            if body.add_generation_prompt is not None:
                raise InvalidRequestError("add_generation_prompt needs messages", param="add_generation_prompt")
            token_ids = await self._encode_text(body.prompt, "prompt", body.add_special_tokens is not False)
        else:
            if body.add_special_tokens is not None:
                raise InvalidRequestError("add_special_tokens needs prompt", param="add_special_tokens")
            assert body.messages is not None
            flat = [message.flat() for message in body.messages]
            _check_bytes("".join(message["content"] for message in flat), "messages")
            text = await self._render(self.bridge.texts.run, flat, _size_of(flat), body.add_generation_prompt is not False)
            token_ids = await self._encode_text(text, "messages", False)

        texts = Mapped(token_ids, lambda token: self.names(token)[0]) if body.return_token_strs else None
        known = {"count": len(token_ids), "max_model_len": self.engine.max_model_len}
        return JsonInPieces({**known, "tokens": token_ids, "token_strs": texts})

    async def detokenize(self, http: HttpRequest) -> Response:
        """The text of token ids."""
        body = await self._read(http, protocol.DetokenizeRequest)
        vocab_size = self.engine.tokenizer.vocab_size
        if len(body.tokens) > MAX_TOKENS:
            raise InvalidRequestError(f"there are {len(body.tokens)} tokens; at most {MAX_TOKENS} are decoded at a time", param="tokens")
        wrong = next((token for token in body.tokens if token >= vocab_size), None)
        if wrong is not None:
            raise InvalidRequestError(f"tokens holds token id {wrong}; accepted are 0 to {vocab_size - 1}", param="tokens")
        text = await unless_gone(http.receive, self.bridge.texts.run(len(body.tokens), self.engine.tokenizer.decode, body.tokens, False))
        return _gone() if text is None else JsonInPieces({"prompt": text})

    async def _encode_prompt(self, text: str, size: int, add_special_tokens: bool = True) -> list[int]:
        """Of a request to be answered that has `size` characters of text in all. Raises InvalidRequestError or QueueFullError."""
        if size < LONG_TEXT:
            return self.engine.tokenizer.encode(text, add_special_tokens)
        check_length(text, self.engine)
        return (await self.bridge.aside(size, self.engine.tokenizer.encode_aside, [text], add_special_tokens))[0]

    async def _encode_text(self, text: str, param: str, add_special_tokens: bool) -> list[int]:
        """Of a text that is only tokenized: no prompt waits for it. Raises InvalidRequestError or QueueFullError."""
        if len(text) < LONG_TEXT:
            return self.engine.tokenizer.encode(text, add_special_tokens)
        _check_bytes(text, param)
        return (await self.bridge.texts.run(len(text), self.engine.tokenizer.encode_aside, [text], add_special_tokens))[0]

    async def _render(
        self, aside: Callable[..., Awaitable[str]], messages: list[dict[str, str]], size: int, add_generation_prompt: bool = True
    ) -> str:
        """A conversation of `size` characters as text, `aside` if it is long."""
        render = self.engine.tokenizer.render
        return render(messages, add_generation_prompt) if size < LONG_TEXT else await aside(size, render, messages, add_generation_prompt)

    # About the server.

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.model,
            "object": "model",
            "created": self.created,
            "owned_by": "headway",
            "root": self.engine.config.model,
            "parent": None,
            "max_model_len": self.engine.max_model_len,
        }

    async def list_models(self) -> Response:
        """The one model that is served."""
        return _json({"object": "list", "data": [self._card()]})

    async def get_model(self, model_id: str) -> Response:
        """One model by its name."""
        self._check_model(model_id)
        return _json(self._card())

    async def health(self) -> Response:
        """200 while requests are taken."""
        if self.bridge.failure is not None:
            raise ApiError(503, "the engine has stopped", kind="server_error", code="engine_stopped")
        if self.bridge.stalled:
            raise ApiError(503, f"the engine has not come round for {STALL_S:g} s", kind="server_error", code="engine_stalled")
        if self.bridge.draining:
            raise errors.DrainingError
        return _json({"status": "ok"})

    async def version(self) -> Response:
        return _json({"version": __version__})

    async def metrics(self) -> Response:
        """Counters for Prometheus."""
        return Response(generate_latest(self.registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)

    # Reading requests.

    async def _read(self, http: HttpRequest, model: type[Body]) -> Body:
        """The request's body as `model`, for the served model. Raises ApiError."""
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            got = shown(kind) if kind else "none"
            raise ApiError(415, f"the content type must be application/json, got {got}", code="unsupported_media_type")
        raw = await _read_bytes(http, self.options.max_body_bytes)
        try:
            body = model.model_validate_json(raw)
        except ValidationError as error:
            if error.error_count() > MAX_NUM_ERRORS:
                raise ApiError(400, f"the body has {error.error_count()} wrong or unknown fields") from None
            raise errors.from_validation(error.errors(include_url=False, include_input=False), model.accepted()) from None
        self._check_model(body.model)  # type: ignore[attr-defined]
        return body

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self.model:
            raise ApiError(404, f"there is no model {shown(name)}; this server has {self.model!r}", param="model", code="model_not_found")


async def _read_bytes(http: HttpRequest, limit: int) -> bytes:
    """The whole body. Raises ApiError 413 beyond `limit` bytes, whether announced or sent in chunks.

    A body that is too large is read a while longer, so that the client gets to see the answer instead of a broken connection.
    """
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large", headers={"Connection": "close"})
    length = http.headers.get("content-length", "")
    if length.isdigit() and int(length) > limit and "expect" in http.headers:
        raise too_large
    size, parts = 0, []
    async for part in http.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        elif size > 8 * limit:
            break
        else:
            parts.clear()
    if size > limit:
        raise too_large
    return b"".join(parts)


def _stream_usage(body: protocol._Sampling) -> tuple[bool, bool]:
    wanted = body.stream_options
    return (bool(wanted.include_usage), bool(wanted.continuous_usage_stats)) if wanted is not None else (False, False)


def _size_of(messages: Sequence[Mapping[str, str]]) -> int:
    return sum(len(message["content"]) + MESSAGE_LENGTH for message in messages)


def _check_bytes(text: str, param: str) -> None:
    """Raises InvalidRequestError for more text than is tokenized without being answered."""
    num_bytes = len(text.encode("utf-8", "replace"))
    if num_bytes > MAX_TEXT:
        raise InvalidRequestError(f"the text has {num_bytes} bytes; at most {MAX_TEXT} are tokenized at a time", param=param)


def _gone() -> Response:
    """For a client that went away: nobody reads it."""
    return Response(status_code=499)


def _json(content: Any) -> Response:
    return Response(json.dumps(content), media_type="application/json")
