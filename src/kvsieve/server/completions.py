"""``/v1/completions``: text in, its continuation out."""

import secrets
from collections.abc import Sequence
from typing import Any

from kvsieve.engine.requests import PromptLogprobs, PromptProgress
from kvsieve.server.choices import Choice, LoggedToken, Piece, prompt_tokens
from kvsieve.server.logprobs import legacy_logprobs
from kvsieve.server.reply import Asked, Chunk, Reply
from kvsieve.server.sse import DONE


class CompletionReply(Reply):
    """Replies ``text_completion``.

    echoes  text of each prompt if the reply is to begin with it, else nothing each
    """

    def __init__(self, asked: Asked, *, echoes: Sequence[str]) -> None:
        super().__init__(asked)
        self._echoes = echoes
        self._scored: dict[int, list[LoggedToken]] = {}
        self._scores = asked.requests[0].params.prompt_logprobs is not None
        for choice in self.choices:
            # Who scores a text counts tokens: there is one entry for each.
            choice.lists_end = self._scores

    def begin(self) -> list[Chunk]:
        """The prompts, where they are to be echoed and no log probabilities are to come along."""
        if self._scores:
            return []
        echoes = [(choice, self._echo(choice)) for choice in self.choices]
        return [self._chunk(choice, echo) for choice, echo in echoes if echo]

    def progress(self, choice: Choice, progress: PromptProgress) -> Chunk:
        return self._chunk(choice, "", prompt_progress=self.progress_fields(progress))

    def scored(self, choice: Choice, scores: PromptLogprobs) -> list[Chunk]:
        echo = self._echo(choice)
        tokens = prompt_tokens(
            self.asked.requests[choice.index].prompt_ids,
            scores.tokens,
            tokenizer=self.asked.tokenizer,
            text=echo,
        )
        self._scored[choice.index] = tokens
        chunk = self._chunk(choice, echo)
        chunk["choices"][0]["logprobs"] = legacy_logprobs(tokens, self.asked.tokenizer)
        return [chunk]

    def piece(self, choice: Choice, piece: Piece) -> list[Chunk]:
        chunks = []
        logged = self._logged(choice, piece.tokens)
        if piece.text or (logged and logged["tokens"]):
            chunk = self._chunk(choice, piece.text, **self.speed(choice))
            chunk["choices"][0]["logprobs"] = logged
            chunks.append(chunk)
        if piece.is_last:
            last = self._chunk(choice, "", **self.facts(choice))
            last["choices"][0]["finish_reason"] = choice.ended.finish_reason
            chunks.append(last)
        return chunks

    def end(self) -> list[Chunk | str]:
        if not self.asked.include_usage:
            return [DONE]
        return [{**self._head(), "choices": [], "usage": self.usage()}, DONE]

    def whole(self) -> dict[str, Any]:
        choices = []
        for choice in self.choices:
            shown = {
                "index": choice.index,
                "text": self._echo(choice) + choice.text,
                "logprobs": self._all_logged(choice),
                "finish_reason": choice.ended.finish_reason,
            }
            choices.append(shown if len(self.choices) == 1 else {**shown, **self.facts(choice)})
        facts = self.facts(self.choices[0])
        return {**self._head(), "choices": choices, "usage": self.usage(), **facts}

    def _echo(self, choice: Choice) -> str:
        return self._echoes[choice.index // self.asked.per_prompt]

    def _logged(self, choice: Choice, tokens: Sequence[Any]) -> dict[str, list[Any]] | None:
        if not self.asked.logprobs:
            return None
        offset = len(self._echo(choice))
        return legacy_logprobs(tokens, self.asked.tokenizer, offset=offset)

    def _all_logged(self, choice: Choice) -> dict[str, list[Any]] | None:
        reply = self._logged(choice, choice.tokens)
        if reply is None or choice.index not in self._scored:
            return reply
        prompt = legacy_logprobs(self._scored[choice.index], self.asked.tokenizer)
        return {name: prompt[name] + reply[name] for name in reply}

    def _head(self) -> dict[str, Any]:
        return {
            "id": self.asked.reply_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.asked.model,
            "system_fingerprint": self.asked.fingerprint,
        }

    def _chunk(self, choice: Choice, text: str, **more: Any) -> Chunk:
        chunk = {
            **self._head(),
            "choices": [
                {"index": choice.index, "text": text, "logprobs": None, "finish_reason": None}
            ],
            **more,
        }
        return {**chunk, "usage": None} if self.asked.include_usage else chunk


def completion_id() -> str:
    """An id for a reply, of the kind OpenAI gives."""
    return f"cmpl-{secrets.token_hex(16)}"
