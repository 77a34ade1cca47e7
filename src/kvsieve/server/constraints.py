"""What the text of a reply has to be, from the three places where a request may say it."""

from collections.abc import Mapping
from typing import Any

from kvsieve.server.errors import invalid
from kvsieve.server.protocol import ChatRequest, Common, NamedTool, ResponseFormat
from kvsieve.server.tool_calls import call_schema

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}

Schema = Mapping[str, Any]


def reply_schema(request: Common, *, tools: list[dict[str, Any]] | None = None) -> Schema | None:
    """JSON schema of the reply, or None where any text will do."""
    form: ResponseFormat | None = getattr(request, "response_format", None)
    schemas = [
        one
        for one in (_of_form(form), _of_llama(request.json_schema), _of_tools(request, tools))
        if one is not None
    ]
    if len(schemas) > 1:
        raise invalid(
            "response_format",
            expected="one of response_format, json_schema and a demanded tool",
            got="several",
        )
    return schemas[0] if schemas else None


def demanded_tools(
    request: ChatRequest, tools: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    """The tools of which the model has to call one; none if it is free."""
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        return [tool for tool in tools or [] if tool["function"]["name"] == choice.function.name]
    return list(tools or []) if choice == "required" else []


def _of_form(form: ResponseFormat | None) -> Schema | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return form.schema_ or _ANY_OBJECT
    fields = form.json_schema
    if fields is None or fields.schema_ is None:
        raise invalid("response_format.json_schema.schema", expected="a JSON schema", got="none")
    return fields.schema_


def _of_llama(schema: dict[str, Any] | bool | None) -> Schema | None:
    if schema is None or isinstance(schema, bool):
        return {} if schema is True else None
    return schema


def _of_tools(request: Common, tools: list[dict[str, Any]] | None) -> Schema | None:
    if not isinstance(request, ChatRequest):
        return None
    demanded = demanded_tools(request, tools)
    return call_schema(demanded) if demanded else None
