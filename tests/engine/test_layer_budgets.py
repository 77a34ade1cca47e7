"""Layers with a budget of their own, and exact ones, through the whole engine on both backends."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.engine.llm import LLM
from kvsieve.engine.sampling import SamplingParams
from kvsieve.errors import ConfigError
from tests.tiny_model import write_tiny_gguf

IDS = np.random.default_rng(0).integers(3, 259, 230).tolist()
"""8 blocks, the last one open."""

SELECTORS = [("even", "head"), ("probe", "head"), ("anchors", "group"), ("window", "head")]


@pytest.fixture(scope="module", params=["native", "reference"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    if request.param == "native":
        pytest.importorskip("kvsieve._native", reason="the C++ core is not built")
    path: Path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, head_dim=32, context=256, layers=3)
    with LLM(path, backend=request.param) as llm:
        yield llm


def blocks_read(llm: LLM, sparse: SparseAttention) -> list[list[int] | None]:
    """Lengths of the lists of a decoded token by layer; None: everything was read."""
    heard = []
    with llm.walk(IDS, max_tokens=256, sparse=sparse) as walk:
        walk.read_prompt()
        walk.step(7, on_attention=lambda _, trace: heard.append(trace.lists))
    return [None if lists is None else np.diff(lists.indptr).tolist() for lists in heard]


@pytest.mark.parametrize(("selector", "share"), SELECTORS)
def test_each_layer_reads_its_own_budget(llm: LLM, selector: str, share: str) -> None:
    sparse = SparseAttention(
        k=3,
        selector=selector,
        share=share,
        layer_k=((1, 5), (2, 2)),
        first_layer=1,  # type: ignore[arg-type]
    )
    rows = llm.config.num_kv_heads if share == "group" else llm.config.num_q_heads
    assert blocks_read(llm, sparse) == [[3] * rows, [5] * rows, [2] * rows]


def test_the_first_layer_reads_four_times_the_budget_of_anchors(llm: LLM) -> None:
    def lengths(**fields: object) -> list[int | None]:
        sparse = SparseAttention(**{"k": 1, "share": "group", **fields})  # type: ignore[arg-type]
        return [None if rows is None else rows[0] for rows in blocks_read(llm, sparse)]

    assert lengths() == [4, 1, 1]
    assert lengths(k=2) == [None, 2, 2]  # 8 blocks are all there are
    assert lengths(first_layer=2) == [2, 1, 1]
    assert lengths(layer_k=((0, 3),)) == [3, 1, 1]
    assert lengths(exact_layers=(0,)) == [None, 1, 1]
    assert lengths(selector="even") == [1, 1, 1]
    assert lengths(mass=0.01, k_min=1, k_max=8) == [3, 3, 3]  # the guards are enough


def test_a_layer_whose_budget_holds_the_context_reads_it_whole(llm: LLM) -> None:
    sparse = SparseAttention(k=3, selector="even", layer_k=((0, 8),), exact_layers=(2,))
    first, second, third = blocks_read(llm, sparse)
    assert (first, third) == (None, None)
    assert second == [3] * llm.config.num_q_heads


def test_a_prompts_tiles_follow_the_layers_budget_too(llm: LLM) -> None:
    def read(layer_k: tuple[tuple[int, int], ...]) -> int:
        sparse = SparseAttention(k=3, selector="even", dense_tail=0, layer_k=layer_k)
        done = llm.generate(IDS[:224], SamplingParams(max_tokens=1), sparse=sparse)
        return done.attention.prefill.attended

    # Tiles 3 to 6 see 4 to 7 blocks; of these 5 instead of 3 are read: 1 + 2 + 2 + 2 more a row.
    more = 32 * (1 + 2 + 2 + 2) * llm.config.num_kv_heads
    assert read(((1, 5),)) - read(()) == more


def test_what_was_asked_for_is_reported(llm: LLM) -> None:
    sparse = SparseAttention(
        k=3, selector="even", layer_k=((1, 5),), exact_layers=(0,), profile="tiny.sparse.json"
    )
    report = llm.generate(IDS, SamplingParams(max_tokens=2), sparse=sparse).attention.to_json()
    assert (report["layer_k"], report["exact_layers"]) == ({"1": 5}, [0])
    assert (report["sparse_layers"], report["profile"]) == ([1, 2], "tiny.sparse.json")


def test_layers_that_the_model_lacks_are_refused(llm: LLM) -> None:
    for fields, name in (({"layer_k": ((3, 5),)}, "layer_k"), ({"exact_layers": (3,)}, "exact_l")):
        with pytest.raises(
            ConfigError, match=rf"sparse.{name}.*expected layers from 0 to 2, got 3"
        ):
            llm.generate(IDS, sparse=SparseAttention(**fields))  # type: ignore[arg-type]


def test_a_run_whose_every_layer_is_exact_says_so(llm: LLM) -> None:
    sparse = SparseAttention(k=3, selector="even", exact_layers=(0, 1, 2))
    report = llm.generate(IDS, SamplingParams(max_tokens=2), sparse=sparse).attention
    assert report.mode == "exact"
    assert "exact_layers are all layers" in (report.exact_because or "")


def test_the_estimated_kept_mass_follows_the_layers_budget(llm: LLM) -> None:
    def estimate(**fields: object) -> list[float]:
        sparse = SparseAttention(k=2, first_layer=1, **fields)  # type: ignore[arg-type]
        with llm.walk(IDS, max_tokens=256, sparse=sparse) as walk:
            walk.read_prompt()
            walk.step(7)
            (step,) = walk.totals[1].kept_mass
        return [float(layer.mean()) for layer in step]

    usual = estimate(phase="decode")
    more = estimate(phase="decode", layer_k=((0, 6),), exact_layers=(2,))
    assert usual[0] + 0.05 < more[0] < 1
    assert usual[2] < more[2] == 1
