"""``/completion``: llama.cpp's own endpoint, for the clients that were written for it."""

from collections.abc import Sequence
from typing import Any

from kvsieve.engine.requests import GenerationRequest, PromptProgress
from kvsieve.server.choices import Choice, LoggedToken, Piece
from kvsieve.server.logprobs import chat_logprobs
from kvsieve.server.parameters import NO_LIMIT
from kvsieve.server.reply import Asked, Chunk, Reply
from kvsieve.server.sparse_choice import asked_of


class NativeReply(Reply):
    """Replies of llama.cpp's shape: one object, or a list of them for several prompts.

    fields  of the whole reply to keep, ``a/b`` for a field inside another; none: all
    """

    def __init__(self, asked: Asked, *, fields: Sequence[str] = ()) -> None:
        super().__init__(asked)
        self._fields = fields

    def progress(self, choice: Choice, progress: PromptProgress) -> Chunk:
        return {
            "index": choice.index,
            "content": "",
            "tokens": [],
            "stop": False,
            "prompt_progress": self.progress_fields(progress),
        }

    def piece(self, choice: Choice, piece: Piece) -> list[Chunk]:
        chunks: list[Chunk] = []
        if piece.text or piece.tokens:
            chunk = {
                "index": choice.index,
                "content": piece.text,
                "tokens": [token.token_id for token in piece.tokens],
                "stop": False,
                "tokens_predicted": len(choice.tokens),
                **self._probabilities(piece.tokens),
                **self.speed(choice),
            }
            chunks.append(chunk)
        if piece.is_last:
            chunks.append(self._whole(choice, content="", tokens=[]))
        return chunks

    def whole(self) -> Any:
        replies = []
        for choice in self.choices:
            ids = choice.ended.token_ids if self.asked.return_tokens else []
            reply = self._whole(choice, content=choice.text, tokens=ids)
            if "completion_probabilities" in self._probabilities(()):
                reply.update(self._probabilities(choice.tokens))
            replies.append(reply)
        return replies[0] if len(replies) == 1 else replies

    def _whole(self, choice: Choice, *, content: str, tokens: Sequence[int]) -> dict[str, Any]:
        request, completion = self.asked.requests[choice.index], choice.ended
        reply = {
            "index": choice.index,
            "content": content,
            "tokens": list(tokens),
            "id_slot": -1 if request.slot is None else request.slot,
            "stop": True,
            "stop_type": choice.stop_type,
            "stopping_word": choice.stopping_word,
            "model": self.asked.model,
            "prompt": self.asked.tokenizer.decode(request.prompt_ids, special=True),
            "tokens_predicted": completion.completion_tokens,
            "tokens_evaluated": completion.prompt_tokens,
            "tokens_cached": completion.timings.cache_n,
            "truncated": False,
            "has_new_line": "\n" in choice.text,
            "generation_settings": settings(request),
            **self.facts(choice),
        }
        return _selected(reply, self._fields) if self._fields else reply

    def _probabilities(self, tokens: Sequence[LoggedToken]) -> dict[str, Any]:
        if not self.asked.logprobs:
            return {}
        return {"completion_probabilities": chat_logprobs(tokens, self.asked.tokenizer)}


def settings(request: GenerationRequest) -> dict[str, Any]:
    """llama.cpp's `generation_settings`, with the attention that was asked for."""
    params = request.params
    sparse = request.sparse
    return {
        "n_predict": -1 if params.max_tokens == NO_LIMIT else params.max_tokens,
        "temperature": params.temperature,
        "top_k": params.top_k or 0,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "seed": -1 if params.seed is None else params.seed,
        "repeat_penalty": params.repeat_penalty,
        "repeat_last_n": params.repeat_last_n,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stops),
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
        "sparse": None if sparse is None else asked_of(sparse),
    }


def _selected(reply: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """The fields a request named, those inside others moved to the top."""
    kept: dict[str, Any] = {}
    for path in fields:
        value: Any = reply
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            kept[path.rsplit("/", 1)[-1]] = value
    return kept
