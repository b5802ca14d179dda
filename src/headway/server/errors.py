"""Every failure as OpenAI's error body: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from headway.errors import InvalidRequestError, QueueFullError

RETRY_AFTER = {"Retry-After": "1"}
MAX_SHOWN = 100      # characters of what a client sent that an answer repeats
MAX_MESSAGE = 2000   # characters of any message, however it was made


def shown(text: str) -> str:
    """`text` in quotes, cut to its beginning."""
    return repr(text) if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]!r}..."


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        message = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + "..."
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param if param is None else param[:MAX_SHOWN]
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return Response(json.dumps(self.body()), self.status, self.headers, media_type="application/json")


class DrainingError(Exception):
    """The server is shutting down: it finishes what runs and takes nothing new."""


class EngineFailedError(Exception):
    """The engine could not go on with this request; it is not the request's fault."""


class SlowReaderError(Exception):
    """The client did not read what was written for it, and others needed the memory."""


class AnswerTooLargeError(Exception):
    """An answer that is not streamed became more than the server holds, and others needed the memory."""


def as_api_error(error: Exception) -> ApiError:
    """The answer that an exception becomes; anything unknown is a 500 that tells nothing of the inside."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error), param=error.param, code=error.code)
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=RETRY_AFTER)
    if isinstance(error, DrainingError):
        return ApiError(503, "the server is shutting down", kind="server_error", code="shutting_down", headers=RETRY_AFTER)
    if isinstance(error, SlowReaderError):
        return ApiError(408, str(error), code="slow_reader")
    if isinstance(error, AnswerTooLargeError):
        return ApiError(400, str(error), code="answer_too_large")
    if isinstance(error, ClientDisconnect):   # in the middle of its body: nobody reads this
        return ApiError(400, "the body is incomplete")
    if isinstance(error, HTTPException):
        name = HTTPStatus(error.status_code).phrase
        code = name.lower().replace(" ", "_")
        return ApiError(error.status_code, str(error.detail or name), code=code, headers=error.headers)
    if isinstance(error, EngineFailedError):
        return ApiError(500, str(error), kind="server_error", code="engine_error")
    return ApiError(500, "internal server error", kind="server_error", code="internal_error")


def install(app: FastAPI) -> None:
    """Answers every exception of `app` in this form."""

    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, HTTPException) and error.status_code == 404:
            paths = sorted({path for route in app.routes if (path := getattr(route, "path", None))})
            path = request.url.path[:MAX_SHOWN]
            near = difflib.get_close_matches(path, paths, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            return ApiError(404, f"there is nothing at {shown(request.url.path)}.{hint}", code="not_found").response()
        return as_api_error(error).response()

    known = (ApiError, HTTPException, InvalidRequestError, QueueFullError, DrainingError, EngineFailedError, AnswerTooLargeError)
    for kind in (*known, ClientDisconnect, Exception):
        app.add_exception_handler(kind, answer)


def from_validation(errors: Sequence[Mapping[str, Any]], accepted: Mapping[str, str]) -> ApiError:
    """A 400 for the first field that pydantic complains about.

    errors    pydantic's list of {"loc", "msg", "type", "input"}
    accepted  top-level field -> what it takes, for the fields that take one of several types ("" for the others)
    """
    # A misspelt field is also a missing one; its own name says more.
    first = next((error for error in errors if error["type"] == "extra_forbidden" and len(error["loc"]) == 1), errors[0])
    loc = [str(part)[:MAX_SHOWN] for part in first["loc"]]   # keys may be a client's own words
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}", code="invalid_json")
    if not loc:
        return ApiError(400, "the body must be a JSON object")
    same_field = [error for error in errors if error["loc"][0] == first["loc"][0]]
    if first["type"] == "extra_forbidden" and len(loc) == 1:
        near = difflib.get_close_matches(loc[0], accepted, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        return ApiError(400, f"unknown field {loc[0]!r}.{hint} Accepted: {', '.join(sorted(accepted))}", param=loc[0], code="unknown_field")
    if first["type"] == "none_required":
        return ApiError(400, f"{'.'.join(loc)} is not supported", param=loc[0], code="unsupported_field")
    if len(same_field) > 1 and accepted.get(loc[0]):
        return ApiError(400, f"{loc[0]} must be {accepted[loc[0]]}", param=loc[0])
    message = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
    return ApiError(400, f"{'.'.join(loc)}: {message}", param=loc[0])
