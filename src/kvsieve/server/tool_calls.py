"""Finds the function calls in a model's text while it comes.

Two ways of writing a call are read: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``
(Qwen, Hermes, SmolLM), and a reply that is one JSON object with ``name`` and ``parameters`` or
``arguments`` (Llama 3, and every reply that was made to call by a constraint).
"""

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of a function; `arguments` is a JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a piece of text turned out to be: `content` for the reader, and calls."""

    content: str = ""
    calls: tuple[Call, ...] = ()


class ToolCallReader:
    """Separates calls from content in a growing text. What may be a call is held back.

    names       functions that may be called; a call of another one stays content
    whole_json  whether a reply that is one JSON object is a call
    most        calls at most; None: any number (further ones stay content)
    """

    def __init__(
        self, names: Collection[str], *, whole_json: bool, most: int | None = None
    ) -> None:
        self._names = frozenset(names)
        self._whole_json = whole_json
        self._most = most
        self._held = ""
        self._begun = False
        self._after_call = False
        self.count = 0

    def push(self, text: str) -> Found:
        """Add `text`; what is certain comes back."""
        self._held += text
        if self._whole_json and not self._begun:
            stripped = self._held.lstrip()
            if not stripped or stripped.startswith("{"):
                return Found()
        self._begun = self._begun or bool(self._held)
        return self._tagged()

    def flush(self) -> Found:
        """End the text: a whole JSON object, or what was held back and is content after all."""
        held, self._held = self._held, ""
        if self._whole_json and not self._begun:
            call = self._call(held)
            if call is not None:
                return Found(calls=(call,))
        if held.startswith(BEGIN):
            # Some models end the reply instead of closing the tag.
            call = self._call(held.removeprefix(BEGIN))
            if call is not None:
                return Found(calls=(call,))
        return Found(content=self._said(held))

    def _tagged(self) -> Found:
        content: list[str] = []
        calls: list[Call] = []
        while True:
            before, begin, rest = self._held.partition(BEGIN)
            if not begin:
                keep = _overlap(self._held, BEGIN)
                content.append(self._said(self._held[: len(self._held) - keep]))
                self._held = self._held[len(self._held) - keep :]
                break
            inside, end, after = rest.partition(END)
            content.append(self._said(before))
            if not end:
                self._held = begin + rest
                break
            call = self._call(inside)
            if call is None:
                content.append(self._said(begin + inside + end))
            else:
                calls.append(call)
                self._after_call = True
            self._held = after
        return Found(content="".join(content), calls=tuple(calls))

    def _said(self, text: str) -> str:
        """Content; the line breaks after a call are part of the format, not of what is said."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text

    def _call(self, text: str) -> Call | None:
        if self._most is not None and self.count >= self._most:
            return None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, dict) or value.get("name") not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            written = arguments
        else:
            written = json.dumps(arguments, ensure_ascii=False)
        self.count += 1
        return Call(id=f"call_{secrets.token_hex(12)}", name=value["name"], arguments=written)


def call_schema(tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """JSON schema of a reply that calls one of `tools`."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool["function"]["name"]},
                "arguments": tool["function"].get("parameters") or {"type": "object"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _overlap(text: str, tag: str) -> int:
    """Characters at the end of `text` with which `tag` begins."""
    for length in range(min(len(text), len(tag) - 1), 0, -1):
        if text.endswith(tag[:length]):
            return length
    return 0
