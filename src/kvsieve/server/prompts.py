"""From the prompts of a request to token ids."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvsieve.engine.chat_template import Renderer, encode_messages
from kvsieve.engine.no_vocabulary import AnyTokenizer, NoVocabulary
from kvsieve.errors import TemplateError
from kvsieve.server.config import RequestLimits
from kvsieve.server.errors import context_exceeded, invalid

Ids = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a chat template gets to see."""

    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    tools: Sequence[Mapping[str, Any]] | None = None
    extra: Mapping[str, Any] | None = None


@dataclass(frozen=True, kw_only=True)
class PromptReader:
    """Turns text, ids and conversations into ids that fit in the context. Runs in threads.

    template       None where the model file has none
    longest_token  characters that one token can stand for: a longer text has more tokens, so what
                   cannot fit is refused before time is spent on cutting it
    """

    tokenizer: AnyTokenizer
    template: Renderer | None
    ctx_size: int
    limits: RequestLimits
    longest_token: int

    async def conversation(self, conversation: Conversation) -> Ids:
        """Ids of a conversation in the model's own format."""
        if isinstance(self.tokenizer, NoVocabulary):
            raise self.tokenizer.error("messages", got="a conversation")
        self._check_length(str(message.get("content")) for message in conversation.messages)
        ids = await asyncio.to_thread(
            encode_messages, self.tokenizer, self._template(), **vars(conversation)
        )
        return self._fitting(ids)

    async def text(self, conversation: Conversation) -> str:
        """The text that a conversation becomes."""
        return await asyncio.to_thread(self._template().render, **vars(conversation))

    def _template(self) -> Renderer:
        if self.template is None:
            raise TemplateError("messages: expected a model with a chat template, got one without")
        return self.template

    async def several(self, prompt: object) -> list[Ids]:
        """Ids of each prompt of OpenAI's `prompt`: text, ids, or a list of either."""
        if isinstance(prompt, list) and not prompt:
            raise invalid("prompt", expected="at least one prompt", got=[])
        is_one = not isinstance(prompt, list) or _is_id(prompt[0])
        prompts: list[object] = [prompt] if is_one else list(prompt)  # type: ignore[call-overload]
        if len(prompts) > self.limits.prompts:
            raise invalid("prompt", expected=f"at most {self.limits.prompts}", got=len(prompts))
        return [await self.one(each) for each in prompts]

    async def mixed(self, prompt: object) -> list[Ids]:
        """The same for llama.cpp's `prompt`, where text and ids may also be mixed in one list."""
        if isinstance(prompt, list) and any(_is_id(part) for part in prompt):
            return [await self.one(prompt)]
        return await self.several(prompt)

    async def one(self, prompt: object) -> Ids:
        """Ids of one prompt; an empty text begins with BOS, if the model has one."""
        parts = prompt if isinstance(prompt, list) else [prompt]
        if not parts:
            raise invalid("prompt", expected="at least one token id", got=[])
        self._check_length(part for part in parts if isinstance(part, str))
        ids: list[int] = []
        for place, part in enumerate(parts):
            if isinstance(part, str):
                ids += await asyncio.to_thread(
                    self.tokenizer.encode, part, add_special=place == 0, parse_special=True
                )
            elif _is_id(part) and 0 <= part < self.tokenizer.vocab_size:
                ids.append(part)
            else:
                raise invalid(
                    "prompt",
                    expected=f"text or token ids from 0 to {self.tokenizer.vocab_size - 1}",
                    got=part,
                )
        if not ids:
            if self.tokenizer.bos_id is None:
                raise invalid(
                    "prompt",
                    expected="at least one token, because the model has no BOS token",
                    got="none",
                )
            ids = [self.tokenizer.bos_id]
        return self._fitting(ids)

    def _check_length(self, texts: Iterable[str]) -> None:
        least = -(-sum(map(len, texts)) // self.longest_token)
        if least > self.ctx_size:
            raise context_exceeded(prompt_tokens=least, ctx_size=self.ctx_size)

    def _fitting(self, ids: Sequence[int]) -> Ids:
        if len(ids) > self.ctx_size:
            raise context_exceeded(prompt_tokens=len(ids), ctx_size=self.ctx_size)
        return tuple(ids)


def longest_token(tokenizer: AnyTokenizer) -> int:
    """Most characters that a token of this vocabulary stands for, at least 1."""
    ids = range(tokenizer.vocab_size)
    return max(1, *(len(tokenizer.token_bytes(one, special=True)) for one in ids))


def _is_id(part: object) -> bool:
    return isinstance(part, int) and not isinstance(part, bool)
