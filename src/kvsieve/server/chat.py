"""``/chat/completions``: a conversation in, the assistant's next message out."""

import secrets
from typing import Any

from kvsieve.engine.requests import PromptProgress
from kvsieve.server.choices import Choice, Piece
from kvsieve.server.logprobs import chat_logprobs
from kvsieve.server.reply import Asked, Chunk, Reply
from kvsieve.server.sse import DONE
from kvsieve.server.tool_calls import Call, Found, ToolCallReader


class ChatReply(Reply):
    """Replies ``chat.completion`` and ``chat.completion.chunk``.

    readers  one per choice where the model may call functions; else none
    """

    def __init__(self, asked: Asked, *, readers: list[ToolCallReader] | None = None) -> None:
        super().__init__(asked)
        self._readers = readers
        self._contents = ["" for _ in self.choices]
        self._calls: list[list[Call]] = [[] for _ in self.choices]

    def begin(self) -> list[Chunk]:
        """The first delta names the role, before the prompt is read."""
        return [
            self._chunk(choice, {"role": "assistant", "content": ""}) for choice in self.choices
        ]

    def progress(self, choice: Choice, progress: PromptProgress) -> Chunk:
        return self._chunk(choice, {}, prompt_progress=self.progress_fields(progress))

    def piece(self, choice: Choice, piece: Piece) -> list[Chunk]:
        found = self._read(choice.index, piece)
        self._contents[choice.index] += found.content
        chunks: list[Chunk] = []
        logged = chat_logprobs(piece.tokens, self.asked.tokenizer) if self.asked.logprobs else []
        if found.content or logged:
            chunk = self._chunk(choice, {"content": found.content}, **self.speed(choice))
            if logged:
                chunk["choices"][0]["logprobs"] = {"content": logged, "refusal": None}
            chunks.append(chunk)
        for call in found.calls:
            calls = self._calls[choice.index]
            chunks.append(
                self._chunk(choice, {"tool_calls": [{"index": len(calls), **_call(call)}]})
            )
            calls.append(call)
        if piece.is_last:
            last = self._chunk(choice, {}, **self.facts(choice))
            last["choices"][0]["finish_reason"] = self._finish_reason(choice)
            chunks.append(last)
        return chunks

    def end(self) -> list[Chunk | str]:
        if not self.asked.include_usage:
            return [DONE]
        return [{**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage()}, DONE]

    def whole(self) -> dict[str, Any]:
        choices = [self._whole_choice(choice) for choice in self.choices]
        return {
            **self._head("chat.completion"),
            "choices": choices,
            "usage": self.usage(),
            **self.facts(self.choices[0]),
        }

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        calls = self._calls[choice.index]
        content: str | None = self._contents[choice.index]
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = [_call(call) for call in calls]
        logged = None
        if self.asked.logprobs:
            tokens = chat_logprobs(choice.tokens, self.asked.tokenizer)
            logged = {"content": tokens, "refusal": None}
        shown = {
            "index": choice.index,
            "message": message,
            "logprobs": logged,
            "finish_reason": self._finish_reason(choice),
        }
        return shown if len(self.choices) == 1 else {**shown, **self.facts(choice)}

    def _read(self, index: int, piece: Piece) -> Found:
        if self._readers is None:
            return Found(content=piece.text)
        reader = self._readers[index]
        found = reader.push(piece.text)
        if not piece.is_last:
            return found
        rest = reader.flush()
        return Found(content=found.content + rest.content, calls=found.calls + rest.calls)

    def _finish_reason(self, choice: Choice) -> str:
        reason = choice.ended.finish_reason
        return "tool_calls" if self._calls[choice.index] and reason == "stop" else reason

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.asked.reply_id,
            "object": kind,
            "created": self.created,
            "model": self.asked.model,
            "system_fingerprint": self.asked.fingerprint,
        }

    def _chunk(self, choice: Choice, delta: dict[str, Any], **more: Any) -> Chunk:
        chunk = {
            **self._head("chat.completion.chunk"),
            "choices": [
                {"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}
            ],
            **more,
        }
        return {**chunk, "usage": None} if self.asked.include_usage else chunk


def chat_id() -> str:
    """An id for a reply, of the kind OpenAI gives."""
    return f"chatcmpl-{secrets.token_hex(16)}"


def _call(call: Call) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }
