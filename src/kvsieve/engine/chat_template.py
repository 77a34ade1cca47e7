"""Chat templates: the Jinja program that a model file carries, and the ids of what it renders."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from kvsieve.engine.template_sandbox import CompiledTemplate
from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.errors import ConfigError, TemplateError

_SHIELDS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Noncharacters, which Unicode keeps out of text that is exchanged."""


class Renderer(Protocol):
    """What turns a conversation into text: a `ChatTemplate`, or one in another process."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a conversation; see `ChatTemplate.render`."""


class ChatTemplate:
    """Renders conversations into a model's own prompt format. May be shared between threads."""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        if not isinstance(source, str):
            raise TemplateError(f"[ChatTemplate] source: expected str, got {type(source).__name__}")
        self._specials = {"bos_token": bos_token, "eos_token": eos_token}
        self._compiled = CompiledTemplate(source)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], tokenizer: Tokenizer) -> "ChatTemplate":
        """Take ``tokenizer.chat_template`` of a GGUF; TemplateError where there is none."""
        source = metadata.get("tokenizer.chat_template")
        if source is None:
            raise TemplateError(
                "[ChatTemplate] tokenizer.chat_template: expected a template, got none: "
                "this model file has no chat format"
            )
        bos, eos = tokenizer.bos_id, tokenizer.eos_id
        return cls(
            source,
            bos_token="" if bos is None else tokenizer.token_text(bos),
            eos_token="" if eos is None else tokenizer.token_text(eos),
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Text of a conversation, up to where the assistant answers if `add_generation_prompt`.

        tools  functions the model may call, each as OpenAI's object ``{"type": "function", ...}``
        extra  more variables that the template may look at; they replace none of the others

        TemplateError if the messages have no roles, or the template fails or refuses them.
        """
        _check_messages(messages)
        values = {
            **(extra or {}),
            **self._specials,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None if tools is None else list(tools),
            "documents": None,
        }
        return self._compiled.render(values)


def encode_chat(tokenizer: Tokenizer, text: str, *, shield: str = "") -> list[int]:
    """Ids of a rendered conversation.

    BOS stands in front exactly once if the template wrote it or the model wants it; EOS is not
    added, because a prompt goes on. For `shield` see `Tokenizer.encode`.
    """
    ids = tokenizer.encode(text, add_special=False, parse_special=True, shield=shield)
    bos = tokenizer.bos_id
    if tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
        ids.insert(0, bos)
    return ids


def encode_messages(
    tokenizer: Tokenizer,
    template: Renderer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of a conversation, in which only the template writes control tokens.

    ``<|im_end|>`` in a message or a tool is encoded as the plain characters it is made of, so that
    nobody can end a turn, or begin one as someone else, by what they say.
    """
    given = {"messages": list(messages), "tools": tools, "extra": dict(extra or {})}
    said = list(_strings(given))
    shield = next((one for one in _SHIELDS if not any(one in text for text in said)), None)
    if shield is None:
        raise ConfigError(
            "[encode_messages] messages: expected text without the noncharacters U+FDD0 to U+FDEF, "
            "got all of them"
        )
    shielded = _shielded(given, shield=shield, texts=tokenizer.control_texts)
    text = template.render(**shielded, add_generation_prompt=add_generation_prompt)
    return encode_chat(tokenizer, text, shield=shield)


def _check_messages(messages: object) -> None:
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not is_list or not messages:
        raise TemplateError(
            "[ChatTemplate.render] messages: expected a list of at least one message, "
            f"got {messages!r:.80}"
        )
    for place, message in enumerate(messages):  # type: ignore[var-annotated, arg-type]
        role = message.get("role") if isinstance(message, Mapping) else None
        if not isinstance(role, str) or not role:
            raise TemplateError(
                f"[ChatTemplate.render] messages: expected message {place} to have a role, "
                f"got {message!r:.80}"
            )


def _strings(value: object) -> Iterator[str]:
    """Every string inside `value`, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


def _shielded(value: Any, *, shield: str, texts: Sequence[str]) -> Any:
    """Copy `value`, with `shield` inside every control token's text."""
    if isinstance(value, str):
        for text in texts:
            if text in value:
                value = value.replace(text, text[0] + shield + text[1:])
        return value
    if isinstance(value, Mapping):
        return {k: _shielded(v, shield=shield, texts=texts) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_shielded(v, shield=shield, texts=texts) for v in value]
    return value
