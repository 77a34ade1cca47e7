"""A selector written in Python: the engine runs it, and the bits are those of the kernels' own."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.attention.selectors.base import Selector
from kvsieve.attention.selectors.even import EvenSelector
from kvsieve.attention.selectors.window import WindowSelector
from kvsieve.engine.llm import LLM
from kvsieve.engine.requests import GenerationRequest
from kvsieve.engine.sampling import SamplingParams
from kvsieve.engine.service import Service
from kvsieve.errors import ConfigError
from kvsieve.kernels.backends import BackendName
from kvsieve.types import F32
from tests.tiny_model import write_tiny_gguf

IDS = np.random.default_rng(0).integers(3, 259, 230).tolist()
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True, temperature=2.0, seed=4)


@dataclass(frozen=True, kw_only=True)
class FirstKey(Selector):
    """Score a block by the logit of its first key."""

    def score(self, q: F32, k: F32, *, scale: float) -> F32:
        first = k[:, :: self.block_size]
        grouped = q.reshape(len(k), -1, q.shape[2])
        logits = np.einsum("hrd,hbd->hrb", grouped, first) * np.float32(scale)
        return logits.reshape(*q.shape[:2], -1).astype(np.float32)


@pytest.fixture(scope="module", params=["native", "reference"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LLM:
    backend: BackendName = request.param
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, head_dim=32, weight_type="Q8_0", context=256)
    return LLM(path, backend=backend, prefill_chunk=64)


def logits_of(llm: LLM, sparse: SparseAttention | None) -> list[F32]:
    """Of every prompt token and three decoded ones."""
    with llm.walk(IDS, max_tokens=240, sparse=sparse) as walk:
        found = [rows for _, rows in walk.prompt_logits(start=0)]
        return [*found, *(walk.step(token) for token in (5, 6, 7))]


def test_a_rule_of_ones_own_is_run_and_named(llm: LLM) -> None:
    sparse = SparseAttention(rule=FirstKey(), k=3, dense_tail=32)
    reply = llm.generate(IDS, PARAMS, sparse=sparse)
    report = reply.attention
    assert (report.mode, report.selector, report.k) == ("sparse", "FirstKey", 3)
    assert report.prefill.density is not None
    assert report.prefill.density < 1
    # 3 of 8 blocks, the union of a group's heads for each KV head.
    assert report.decode.density is not None
    assert report.decode.density < 1
    own, exact = (logits_of(llm, each)[-1] for each in (sparse, None))
    assert np.abs(own - exact).max() > 0


@pytest.mark.parametrize("share", ["head", "group"])
@pytest.mark.parametrize("phase", ["both", "decode"])
def test_split_layers_give_the_bits_of_whole_ones(llm: LLM, share: str, phase: str) -> None:
    """`WindowSelector` in Python lists what the kernels' `window` lists."""
    own = SparseAttention(rule=WindowSelector(), k=3, share=share, phase=phase, dense_tail=32)  # type: ignore[arg-type]
    named = replace(own, rule=None, selector="window")
    for got, expected in zip(logits_of(llm, own), logits_of(llm, named), strict=True):
        np.testing.assert_array_equal(got, expected)
    replies = [llm.generate(IDS, PARAMS, sparse=sparse) for sparse in (own, named)]
    assert replies[0].token_ids == replies[1].token_ids
    assert replies[0].attention.decode == replies[1].attention.decode
    assert replies[0].attention.prefill == replies[1].attention.prefill


def test_exact_layers_and_short_contexts_stay_exact(llm: LLM) -> None:
    exact = llm.generate(IDS, PARAMS, sparse=None)
    for sparse in (
        SparseAttention(rule=FirstKey(), k=8),
        SparseAttention(rule=FirstKey(), k=3, exact_layers=(0, 1)),
    ):
        assert llm.generate(IDS, PARAMS, sparse=sparse).token_ids == exact.token_ids


def test_what_a_rule_cannot_be(llm: LLM) -> None:
    with pytest.raises(ConfigError, match="rule: expected a Selector, got 'even'"):
        SparseAttention(rule="even")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rule: expected neither selector nor mass beside it"):
        SparseAttention(rule=EvenSelector(), selector="even")
    request = GenerationRequest(
        prompt_ids=tuple(IDS), params=PARAMS, sparse=SparseAttention(rule=FirstKey(), k=3)
    )
    with (
        Service(llm, max_sequences=1) as service,
        pytest.raises(ConfigError, match=r"sparse\.rule: expected none, .* got FirstKey"),
    ):
        service.submit(request, lambda event: None)
