"""From the messages and tools of a request to what a chat template gets to see."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvsieve.server.config import RequestLimits
from kvsieve.server.errors import ApiError, invalid
from kvsieve.server.prompts import Conversation
from kvsieve.server.protocol import ChatRequest, Message, NamedTool, TemplateRequest, Tool, ToolCall

_TEMPLATE_KWARGS = frozenset({"enable_thinking", "thinking", "reasoning_effort", "date_string"})
"""Variables of templates that a request may set: those that choose between ways to answer."""


def conversation(
    request: ChatRequest | TemplateRequest, *, limits: RequestLimits, can_use_tools: bool
) -> Conversation:
    """What the template gets to see of a request; ApiError on what is not supported.

    `can_use_tools`: whether the template tells the model about tools.
    """
    tools = template_tools(request, limits=limits)
    if tools is not None and not can_use_tools:
        raise invalid(
            "tools",
            expected="none, because the model's chat template has no place for them",
            got="some",
        )
    return Conversation(
        messages=template_messages(request.messages, limits=limits),
        add_generation_prompt=request.add_generation_prompt is not False,
        tools=tools,
        extra=template_extra(request),
    )


def template_messages(
    messages: Sequence[Message], *, limits: RequestLimits
) -> list[dict[str, Any]]:
    """Messages as templates expect them: one text each, `developer` as `system`."""
    if not messages:
        raise invalid("messages", expected="at least one message", got=[])
    if len(messages) > limits.messages:
        raise invalid("messages", expected=f"at most {limits.messages}", got=len(messages))
    return [_plain(message, f"messages[{place}]") for place, message in enumerate(messages)]


def template_tools(
    request: ChatRequest | TemplateRequest, *, limits: RequestLimits
) -> list[dict[str, Any]] | None:
    """Functions the model is offered; none if the request says ``tool_choice: none``."""
    tools = request.tools or []
    if len(tools) > limits.tools:
        raise invalid("tools", expected=f"at most {limits.tools}", got=len(tools))
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise invalid("tools", expected="functions of different names", got=names)
    choice = request.tool_choice
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid(
            "tool_choice", expected="the name of one of the tools", got=choice.function.name
        )
    if choice == "required" and not tools:
        raise invalid("tool_choice", expected="tools beside it", got="required and no tools")
    if choice == "none" or not tools:
        return None
    return [_tool(tool) for tool in tools]


def template_extra(request: ChatRequest | TemplateRequest) -> dict[str, Any]:
    """More variables of the template; a request may set a few and not bring its own template."""
    if request.chat_template is not None:
        raise ApiError(
            400,
            "chat_template: expected none, because a template is a program and the server's own "
            "is used, got one",
            param="chat_template",
        )
    extra = dict(request.chat_template_kwargs or {})
    for name in extra:
        if name not in _TEMPLATE_KWARGS:
            raise invalid(
                "chat_template_kwargs",
                expected=f"keys among {', '.join(sorted(_TEMPLATE_KWARGS))}",
                got=name,
            )
    if request.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", request.reasoning_effort)
    return extra


def _tool(tool: Tool) -> dict[str, Any]:
    function = tool.function.model_dump(exclude_none=True)
    return {"type": "function", "function": function}


def _plain(message: Message, where: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": _text(message, where)}
    if message.name is not None:
        plain["name"] = message.name
    if message.tool_calls:
        if role != "assistant":
            raise invalid(f"{where}.tool_calls", expected="an assistant's message", got=role)
        plain["tool_calls"] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id is not None:
        plain["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    return plain


def _text(message: Message, where: str) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant":
            return ""
        raise invalid(f"{where}.content", expected="text, or a list of text parts", got="null")
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}.content[{place}]") for place, part in enumerate(content))


def _part(part: Mapping[str, Any], where: str) -> str:
    kind = part.get("type")
    text = part.get("refusal" if kind == "refusal" else "text")
    if kind not in ("text", "refusal"):
        raise invalid(where, expected='{"type": "text", "text": ...}, the only kind', got=kind)
    if not isinstance(text, str):
        raise invalid(f"{where}.text", expected="a string", got=text)
    return text


def _call(call: ToolCall) -> dict[str, Any]:
    """A call with its arguments as an object, which templates write out themselves."""
    arguments: Any = call.function.arguments or {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }
