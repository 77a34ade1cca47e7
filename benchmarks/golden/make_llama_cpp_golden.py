"""Freeze what llama.cpp predicts on a text: tests/data/llama_cpp_english.json.

Needs llama-cpp-python (0.3.36 made the file in the repository):

    python benchmarks/golden/make_llama_cpp_golden.py MODEL.gguf

Exact attention, f16 cache, flash attention on. Per position: the token, llama.cpp's most likely
next token, and the log-probability it gives the token that really follows.
"""

import json
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama, __version__

DATA = Path(__file__).parents[2] / "tests" / "data"
NUM_TOKENS = 1000


def main() -> None:
    model = Llama(
        sys.argv[1], n_ctx=1024, n_batch=256, logits_all=True, flash_attn=True, verbose=False
    )
    text = (DATA / "english.txt").read_text()
    ids = model.tokenize(text.encode(), add_bos=False)[:NUM_TOKENS]
    model.eval(ids)
    logits = np.asarray(model.scores[: len(ids)], np.float64)
    top = logits.argmax(axis=1)
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    following = log_probs[np.arange(len(ids) - 1), ids[1:]]
    result = {
        "made_with": f"llama-cpp-python {__version__}, f16 cache, flash attention",
        "model": Path(sys.argv[1]).name,
        "ids": ids,
        "top1": top.tolist(),
        "log_prob_of_next": [round(float(x), 5) for x in following],
    }
    (DATA / "llama_cpp_english.json").write_text(json.dumps(result, separators=(",", ":")) + "\n")
    print(len(ids), "tokens, perplexity", float(np.exp(-following.mean())))


if __name__ == "__main__":
    main()
