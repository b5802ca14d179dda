"""The fields that ask for a form of the text, and what all bodies' models are made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from headway.errors import InvalidRequestError
from headway.structured_outputs import StructuredOutputsParams

Text = Annotated[str, Field(min_length=1)]
Strings = Annotated[list[str], Field(fail_fast=True)]
Unsupported = Annotated[None, Field(description="not supported; null or left out")]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def accepted(cls) -> dict[str, str]:
        """Field -> what it takes, in words ("" where pydantic's own message is enough)."""
        return {name: (spec.json_schema_extra or {}).get("x-accepts", "") for name, spec in cls.model_fields.items()}  # type: ignore[union-attr, misc]


def accepts(words: str) -> dict[str, Any]:
    return {"x-accepts": words}


class JsonSchemaFormat(Strict):
    name: Text
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = Field(None, description="true or false: every answer keeps to the schema")


class ResponseFormat(Strict):
    """OpenAI's way to ask for a form of the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    def form(self) -> StructuredOutputsParams | None:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise InvalidRequestError('response_format: json_schema goes with type "json_schema"', param="response_format")
        if self.json_schema is not None:
            return StructuredOutputsParams(json=self.json_schema.schema_)
        return StructuredOutputsParams(json_object=True) if self.type == "json_object" else None


class StructuredOutputs(Strict):
    """vLLM's way; exactly one of the first five."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="a JSON schema, as an object or as text")
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = Field(None, description="Lark, or GBNF")
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    structural_tag: Unsupported = None

    def form(self) -> StructuredOutputsParams:
        return StructuredOutputsParams(
            self.json_, self.regex, self.choice, self.grammar, self.json_object, bool(self.disable_any_whitespace)
        )   # fmt: skip


class WithForm(Strict):
    """The fields of which one may ask for a form; both completions endpoints have them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = Field(
        None, description="older name of structured_outputs.json",
        json_schema_extra=accepts("a JSON schema, as an object or as text, or null"),
    )   # fmt: skip
    guided_regex: str | None = Field(None, description="older name of structured_outputs.regex")
    guided_choice: Strings | None = Field(None, description="older name of structured_outputs.choice")
    guided_grammar: str | None = Field(None, description="older name of structured_outputs.grammar")

    def form_field(self) -> str | None:
        """The one field that asks for a form of the text. Raises InvalidRequestError where several do."""
        given = [name for name in _FORM_NAMES if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type == "text":
            given.remove("response_format")
        if len(given) > 1:
            raise InvalidRequestError(f"a text has one form: give one of {' and '.join(given)}", param=given[-1])
        return given[0] if given else None

    def form(self) -> StructuredOutputsParams | None:
        name = self.form_field()
        if name is None:
            return self.response_format.form() if self.response_format is not None else None
        given = getattr(self, name)
        try:
            if isinstance(given, ResponseFormat | StructuredOutputs):
                return given.form()
            return StructuredOutputsParams(**{name.removeprefix("guided_"): given})
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error), param=name) from None


_FORM_NAMES = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
