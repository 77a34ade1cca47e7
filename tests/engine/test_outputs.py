import json

import pytest

from kvsieve.engine.outputs import (
    AttentionReport,
    BlockReads,
    Completion,
    EngineInfo,
    Timings,
)

PROMPT_MS, PREDICTED_MS = 500.0, 250.0


def make_completion(attention: AttentionReport) -> Completion:
    return Completion(
        text="71432.",
        token_ids=[11, 12, 13],
        prompt_tokens=4000,
        finish_reason="stop",
        timings=Timings(
            prompt_n=4000,
            prompt_ms=PROMPT_MS,
            prompt_attention_ms=200.0,
            prompt_select_ms=50.0,
            prompt_dense_ms=249.12345,
            predicted_n=3,
            predicted_ms=PREDICTED_MS,
            predicted_attention_ms=100.0,
            predicted_select_ms=20.0,
            predicted_dense_ms=120.0,
        ),
        attention=attention,
        tokens=[],
        seed=5,
        engine=EngineInfo(
            model_name="tiny", fingerprint="00ff", isa="scalar", threads=2, version="0.1.0"
        ),
    )


SPARSE = AttentionReport(
    mode="sparse",
    selector="probe",
    share="head",
    k=32,
    block_size=32,
    prefill=BlockReads(attended=300, causal=400, queries=10),
    decode=BlockReads(attended=60, causal=250, queries=2),
    exact_because=None,
    sparse_layers=(0, 2),
)
EXACT = AttentionReport(
    mode="exact",
    selector=None,
    share=None,
    k=None,
    block_size=None,
    prefill=BlockReads(attended=400, causal=400, queries=10),
    decode=BlockReads(),
    exact_because=None,
)


def test_the_json_object_word_for_word():
    assert make_completion(SPARSE).to_json() == {
        "text": "71432.",
        "token_ids": [11, 12, 13],
        "prompt_tokens": 4000,
        "completion_tokens": 3,
        "finish_reason": "stop",
        "timings": {
            "cache_n": 0,
            "prompt_n": 4000,
            "prompt_ms": 500.0,
            "prompt_attention_ms": 200.0,
            "prompt_select_ms": 50.0,
            "prompt_dense_ms": 249.123,
            "prompt_per_second": 8000.0,
            "predicted_n": 3,
            "predicted_ms": 250.0,
            "predicted_attention_ms": 100.0,
            "predicted_select_ms": 20.0,
            "predicted_dense_ms": 120.0,
            "predicted_per_second": 12.0,
        },
        "attention": {
            "mode": "sparse",
            "selector": "probe",
            "share": "head",
            "k": 32,
            "block_size": 32,
            "blocks_read": 360,
            "density": {"prefill": 0.75, "decode": 0.24},
            "exact_because": None,
            "sparse_layers": [0, 2],
            "mass": None,
            "exact_layers": [],
            "layer_k": {},
            "profile": None,
            "kept_mass": None,
            "warning": None,
        },
        "model": {"name": "tiny", "fingerprint": "00ff"},
        "isa": "scalar",
        "threads": 2,
        "version": "0.1.0",
    }


def test_a_phase_that_never_ran_is_null_and_all_of_it_is_json():
    attention = json.loads(json.dumps(make_completion(EXACT).to_json()))["attention"]
    assert attention["density"] == {"prefill": 1.0, "decode": None}
    assert attention["selector"] is None
    assert attention["blocks_read"] == 400


def test_blocks_per_query():
    assert SPARSE.decode.blocks_per_query == pytest.approx(30)
    assert BlockReads().blocks_per_query is None


def test_no_time_is_no_speed():
    nothing = Timings(**dict.fromkeys(Timings.__dataclass_fields__, 0))
    assert nothing.prompt_per_second == 0
    assert nothing.predicted_per_second == 0
