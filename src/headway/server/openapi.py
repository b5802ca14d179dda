"""The OpenAPI document: what FastAPI derives from the routes, plus the request bodies, which the routes read themselves."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from headway.server.protocol import ErrorResponse

REF = "#/components/schemas/{model}"


def body(model: type[BaseModel]) -> dict[str, Any]:
    """`openapi_extra` of a route that takes `model`."""
    schema = {"$ref": REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def failures(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that may answer with these errors."""
    return {status: {"model": ErrorResponse} for status in statuses}


def event_stream(chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that answers with server-sent events when asked to stream."""
    description = f"The answer; with `stream: true`, events that each hold one {chunk.__name__}, then `[DONE]`."
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": {"$ref": REF.format(model=chunk.__name__)}}
    event = {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}, "required": ["data"]}
    return {200: {"description": description, "content": {"text/event-stream": {"schema": event}}}}


def install(app: FastAPI, model_name: str, bodies: list[type[BaseModel]], chunks: list[type[BaseModel]]) -> None:
    """Makes `app.openapi` tell of the request bodies, of the chunks in event streams, and of the one model's name."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, own = models_json_schema([(model, "validation") for model in (*bodies, *chunks)], ref_template=REF)
            schema.setdefault("components", {}).setdefault("schemas", {}).update(own["$defs"])
            for operation in (operation for path in schema["paths"].values() for operation in path.values()):
                operation["responses"].pop("422", None)   # FastAPI's own validation answers nothing here
            for name in ("HTTPValidationError", "ValidationError"):
                schema["components"]["schemas"].pop(name, None)
            for model in bodies:
                schema["components"]["schemas"][model.__name__]["properties"]["model"]["anyOf"][0]["enum"] = [model_name]
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
