"""A Llama in Transformers: exact equals sdpa, sparse equals dense attention under its masks."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="make test-transformers installs it")
pytest.importorskip("transformers", reason="make test-transformers installs it")

import kvsieve.transformers as kt  # noqa: E402
from kvsieve import SparseAttention  # noqa: E402
from tests.integrations.transformers.tiny import CACHE, attention_under, llama, token_ids  # noqa: E402

PROMPT, NEW = 150, 6


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


@pytest.fixture
def batch() -> dict[str, Any]:
    """Two rows, the second padded by 37 on the left."""
    real = torch.ones(2, PROMPT + NEW, dtype=torch.long)
    real[1, :37] = 0
    return {
        "ids": token_ids(2, PROMPT + NEW),
        "real": real,
        "positions": (real.cumsum(-1) - 1).clamp(min=0),
    }


def forward(model: Any, batch: dict[str, Any], *, cache: Any = None, steps: bool = False) -> Any:
    """Logits ``[B, T, V]`` of all positions, read at once, or a prompt and then single tokens."""
    ends = [PROMPT, *range(PROMPT + 1, PROMPT + NEW + 1)] if steps else [PROMPT + NEW]
    logits, at = [], 0
    with torch.no_grad():
        for end in ends:
            out = model(
                batch["ids"][:, at:end],
                attention_mask=batch["real"][:, :end],
                position_ids=batch["positions"][:, at:end],
                **{CACHE: cache},
            )
            cache, at = out[CACHE], end
            logits.append(out.logits)
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("steps", [False, True], ids=["at once", "step by step"])
def test_exact_attention_equals_sdpa(model: Any, batch: dict[str, Any], steps: bool) -> None:
    expected = forward(model, batch)
    with kt.exact(model, cache_type="f32") as run:
        got = forward(model, batch, steps=steps)
    real = batch["real"].bool()
    assert (got - expected)[real].abs().max() < 1e-4
    report = run.report()
    assert report.attention.mode == "exact"
    assert report.attention.exact_because is None
    assert report.attention.prefill.density == 1.0
    assert report.exact_layers == (0, 1, 2)


@pytest.mark.parametrize(
    "settings",
    [
        SparseAttention(k=2, dense_tail=0),
        SparseAttention(k=3, selector="even", share="group", dense_tail=32),
        SparseAttention(k=2, phase="decode"),
    ],
    ids=["probe", "even by group", "decode"],
)
def test_sparse_attention_equals_dense_attention_under_its_masks(
    model: Any, batch: dict[str, Any], settings: SparseAttention
) -> None:
    with kt.sparse(model, settings, cache_type="f32", keep_masks=True) as run:
        got = forward(model, batch, steps=True)
    real = batch["real"].bool()
    with attention_under(model, run.masks, real.numpy()):
        expected = forward(model, batch)
    assert (got - expected)[real].abs().max() < 1e-4
    exactly = forward(model, batch)
    assert (got - exactly)[real].abs().max() > 1e-3, "the masks left nothing out that matters"
    report = run.report()
    assert report.attention.mode == "sparse"
    assert report.attention.k == settings.k
    assert report.attention.decode.density is not None
    assert report.attention.decode.density < 1
    attended = sum(read.mask.pairs_attended for read in run.masks if read.phase == "decode")
    causal = sum(read.mask.pairs_causal for read in run.masks if read.phase == "decode")
    assert report.attention.decode.density == attended / causal


def test_a_row_is_what_it_is_alone(model: Any, batch: dict[str, Any]) -> None:
    """The padded row of a batch reads the same blocks and gives the same numbers as by itself."""
    settings = SparseAttention(k=2, dense_tail=0)
    with kt.sparse(model, settings, keep_masks=True) as together:
        both = forward(model, batch, steps=True)
    ids = batch["ids"][1:, 37:]
    with kt.sparse(model, settings, keep_masks=True) as alone, torch.no_grad():
        out = model(ids[:, : PROMPT - 37])
        logits = [out.logits]
        for t in range(PROMPT - 37, PROMPT - 37 + NEW):
            logits.append(model(ids[:, t : t + 1], **{CACHE: out[CACHE]}).logits)
    assert (torch.cat(logits, dim=1)[0] - both[1, 37:]).abs().max() < 1e-4
    masks = [read.mask for read in together.masks if read.row == 1]
    assert masks == [read.mask for read in alone.masks]


def test_other_cache_types_cost_what_their_bits_say(model: Any, batch: dict[str, Any]) -> None:
    expected = forward(model, batch)
    real = batch["real"].bool()
    errors = []
    for cache_type in ("f32", "f16", "q8_0", ("q8_0", "q4_0"), "q4_0"):
        with kt.exact(model, cache_type=cache_type):
            got = forward(model, batch)
        errors.append(((got - expected)[real].norm() / expected[real].norm()).item())
    assert errors == sorted(errors)
    assert all(error < bound for error, bound in zip(errors, (1e-5, 1e-2, 0.1), strict=False))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models(batch: dict[str, Any], dtype: Any) -> None:
    model = llama().to(dtype)
    expected = forward(model, batch)
    with kt.exact(model, cache_type="f32"):
        got = forward(model, batch, steps=True)
    assert got.dtype == dtype
    real = batch["real"].bool()
    tolerance = 2e-2 if dtype == torch.float16 else 1.5e-1
    assert (got - expected)[real].abs().max().item() < tolerance


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(8, 8), (8, 1), (7, 1)])
def test_groups_of_query_heads(num_q_heads: int, num_kv_heads: int) -> None:
    """ATT-09: query head h reads KV head h // group."""
    model = llama(
        hidden_size=num_q_heads * 16,
        num_attention_heads=num_q_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=16,
    )
    ids = token_ids(1, 70)
    with torch.no_grad():
        expected = model(ids).logits
        with kt.exact(model, cache_type="f32"):
            got = model(ids).logits
    assert (got - expected).abs().max() < 1e-4


def test_threads_change_no_bit(model: Any) -> None:
    """BAT-01: repeats, and more threads than there are heads or cores."""
    ids = token_ids(1, 130)
    results = []
    for threads in (1, 1, 2, 3, 7):
        with kt.sparse(model, k=2, dense_tail=0, threads=threads), torch.no_grad():
            results.append(model(ids).logits)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("chunk", [1, 31, 32, 33, 64, 130])
def test_a_prompt_in_pieces(model: Any, chunk: int) -> None:
    """ATT-07: any chunking, and a start that is no multiple of 32, gives the same logits."""
    ids = token_ids(1, 130)
    with kt.exact(model, cache_type="f32") as run, torch.no_grad():
        whole = model(ids).logits
        cache, pieces = run.new_cache(prompt_len=130), []
        for at in range(0, 130, chunk):
            pieces.append(model(ids[:, at : at + chunk], **{CACHE: cache}).logits)
    assert (torch.cat(pieces, dim=1) - whole).abs().max() < 1e-4


@pytest.mark.parametrize("num_tokens", [1, 31, 32, 33, 50, 63, 64, 97])
def test_a_budget_that_everything_fits_changes_nothing(model: Any, num_tokens: int) -> None:
    """ATT-06: up to the budget, and up to 64 tokens whatever the budget, all is read exactly."""
    ids = token_ids(1, num_tokens)
    k = 4 if num_tokens == 97 else 1
    with torch.no_grad():
        with kt.exact(model) as exact:
            expected = model.generate(
                ids, max_new_tokens=1, output_logits=True, return_dict_in_generate=True
            )
        with kt.sparse(model, k=k, dense_tail=0) as run:
            got = model.generate(
                ids, max_new_tokens=1, output_logits=True, return_dict_in_generate=True
            )
    np.testing.assert_array_equal(got.logits[0].numpy(), expected.logits[0].numpy())
    report = run.report()
    assert report.attention.mode == "exact"
    assert report.attention.exact_because
    assert report.attention.blocks_read == exact.report().attention.blocks_read
