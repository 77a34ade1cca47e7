"""Freeze the logits of the Transformers library for the tiny models of `tests/checkpoints.py`.

    python benchmarks/golden/make_transformers_golden.py

Needs `torch` and `transformers` (made with 2.13.0 and 5.24.0) beside what the tests need. Each
model runs in float32 with its plain attention; its logits at all positions go to
``tests/data/golden/NAME.npy``.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.checkpoints import CONFIGS, KEPT, LONG, token_ids, weights, write_folder  # noqa: E402


def logits(name: str) -> np.ndarray:
    """``f32 [positions, vocab]``"""
    with tempfile.TemporaryDirectory() as folder:
        config = transformers.AutoConfig.from_pretrained(write_folder(Path(folder), name))
    config._attn_implementation = "eager"
    model = getattr(transformers, config.architectures[0])(config).float().eval()
    language = {
        k.replace("model.", "model.language_model.", 1): v for k, v in weights(name).items()
    }
    tensors = language if name == "qwen3-vl" else weights(name)
    missing = model.load_state_dict(
        {k: torch.from_numpy(v) for k, v in tensors.items()}, strict=False
    )
    assert not missing.unexpected_keys, missing.unexpected_keys
    left = [k for k in missing.missing_keys if "visual" not in k and k != "lm_head.weight"]
    assert not left, left
    model.tie_weights()
    with torch.no_grad():
        out = model(input_ids=torch.from_numpy(token_ids(name)[None])).logits
    rows = out[0].float().numpy()
    return rows[-KEPT:] if name == LONG else rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "tests" / "data" / "golden")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    for name in CONFIGS:
        found = logits(name)
        np.save(args.output / f"{name}.npy", found)
        print(f"{name}: {found.shape}, from {found.min():.3f} to {found.max():.3f}")


if __name__ == "__main__":
    main()
