"""llama.cpp by the package llama-cpp-python, through its C interface: no Python within a step."""

import ctypes
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import llama_cpp as lib
from json_lines import serve

BATCH, MICRO_BATCH = 2048, 512
CACHE_TYPES = {"f16": lib.GGML_TYPE_F16, "q8_0": lib.GGML_TYPE_Q8_0}


class Engine:
    def __init__(self, *, model: str, threads: int, cache_type: str) -> None:
        # Kept: the library calls it for as long as it lives.
        self._quiet = lib.llama_log_callback(lambda level, text, data: None)
        lib.llama_log_set(self._quiet, ctypes.c_void_p(0))
        lib.llama_backend_init()
        params = lib.llama_model_default_params()
        params.n_gpu_layers = 0
        self._threads, self._type = threads, CACHE_TYPES[cache_type]
        self._model = lib.llama_model_load_from_file(model.encode(), params)
        if not self._model:
            raise RuntimeError("the model could not be loaded")
        self._vocab = lib.llama_model_get_vocab(self._model)

    def measure(
        self, *, token_ids: Sequence[int], text: str | None, decode_tokens: int
    ) -> dict[str, Any]:
        with self._context(len(token_ids) + decode_tokens) as context:
            start = time.perf_counter()
            self._read(context, token_ids)
            first = time.perf_counter()
            for token in token_ids[:decode_tokens]:
                self._read(context, [token])
            end = time.perf_counter()
        return {
            "prompt_tokens": len(token_ids),
            "prefill_s": first - start,
            "decode_ms": 1e3 * (end - first) / decode_tokens,
        }

    def answer(
        self, *, token_ids: Sequence[int], text: str | None, max_tokens: int
    ) -> dict[str, Any]:
        size = lib.llama_vocab_n_tokens(self._vocab)
        reply = b""
        with self._context(len(token_ids) + max_tokens) as context:
            self._read(context, token_ids)
            for _ in range(max_tokens):
                logits = lib.llama_get_logits(context)[:size]
                token = max(range(size), key=logits.__getitem__)
                if lib.llama_vocab_is_eog(self._vocab, token):
                    break
                reply += self._piece(token)
                self._read(context, [token])
        return {"text": reply.decode("utf-8", "replace")}

    @contextmanager
    def _context(self, tokens: int) -> Iterator[Any]:
        params = lib.llama_context_default_params()
        params.n_ctx = tokens + 8
        params.n_batch, params.n_ubatch = BATCH, MICRO_BATCH
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = 1
        params.type_k = params.type_v = self._type
        context = lib.llama_init_from_model(self._model, params)
        if not context:
            raise RuntimeError(f"no context of {tokens} tokens could be made")
        try:
            yield context
        finally:
            lib.llama_free(context)

    def _read(self, context: Any, token_ids: Sequence[int]) -> None:
        """Read tokens up to the logits of the last one."""
        for at in range(0, len(token_ids), BATCH):
            part = token_ids[at : at + BATCH]
            array = (ctypes.c_int32 * len(part))(*part)
            code = lib.llama_decode(context, lib.llama_batch_get_one(array, len(part)))
            if code:
                raise RuntimeError(f"llama_decode returned {code}")
        lib.llama_get_logits(context)

    def _piece(self, token: int) -> bytes:
        buffer = ctypes.create_string_buffer(256)
        size = lib.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, False)
        return buffer.raw[: max(0, size)]


if __name__ == "__main__":
    serve(lambda settings: (Engine(**settings), version("llama-cpp-python")))
