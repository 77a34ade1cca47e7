from pathlib import Path

import pytest

from kvsieve.engine.llm import LLM
from kvsieve.errors import CapacityError, ConfigError
from kvsieve.evals.arms import parse_arms
from kvsieve.evals.bench import run_bench
from tests.tiny_model import write_tiny_gguf


def test_rows_are_named_as_llama_bench_names_them(llm: LLM) -> None:
    results = list(
        run_bench(llm, arms=parse_arms(["exact"]), depths=[40, 70], decode_tokens=3, rounds=1)
    )
    tests = [row.test for result in results for row in (result.prefill, result.decode)]
    assert tests == ["pp40", "tg3 @ d40", "pp70", "tg3 @ d70"]
    row = results[0].prefill
    assert (row.attn, row.cache_type, row.threads, row.ms_stddev) == ("exact", "q8_0", 1, 0.0)


def test_arms_alternate_within_every_round(llm: LLM) -> None:
    heard: list[str] = []
    arms = parse_arms(["exact", "sparse:k=3,tail=0"])
    list(run_bench(llm, arms=arms, depths=[50], decode_tokens=1, rounds=2, on_run=heard.append))
    assert heard == [
        "50 tokens, round 1 of 2, exact",
        "50 tokens, round 1 of 2, sparse:k=3,tail=0",
        "50 tokens, round 2 of 2, exact",
        "50 tokens, round 2 of 2, sparse:k=3,tail=0",
    ]


def test_times_are_medians_and_add_up(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    generate, prompt_ms, step_ms = LLM.generate, iter([9.0, 8.0, 2.0, 4.0]), iter([9, 6, 1, 2])

    def timed(self: LLM, *args, **more):  # type: ignore[no-untyped-def]
        done = generate(self, *args, **more)
        ms = float(next(step_ms))
        steps = [
            replace(step, total_ms=ms + i, attention_ms=1.0) for i, step in enumerate(done.tokens)
        ]
        timings = replace(done.timings, prompt_ms=next(prompt_ms))
        return replace(done, tokens=steps, timings=timings)

    monkeypatch.setattr(LLM, "generate", timed)
    (result,) = run_bench(llm, arms=parse_arms(["exact"]), depths=[40], decode_tokens=3, rounds=3)
    # The first run warms up. Prompts: 8, 2, 4. Steps: 6, 7, 8 then 1, 2, 3 then 2, 3, 4.
    assert result.prefill.ms == 4.0
    assert result.prefill.tokens_per_second == 10_000.0
    assert result.prefill.ms_stddev == pytest.approx(3.0551, abs=1e-4)
    assert result.decode.ms == 3.0
    assert result.decode.tokens_per_second == pytest.approx(333.333, abs=1e-3)
    assert result.decode.attention_ms == 1.0


def test_density_is_that_of_the_row_s_own_phase(llm: LLM) -> None:
    arms = parse_arms(["sparse:k=3,phase=decode"])
    (result,) = run_bench(llm, arms=arms, depths=[300], decode_tokens=2, rounds=1)
    assert result.prefill.density == 1.0
    assert result.decode.density is not None
    assert result.decode.density < 1.0


def test_depths_may_fill_the_context_to_the_last_token_and_no_further(llm: LLM) -> None:
    arms = parse_arms(["exact"])
    (result,) = run_bench(llm, arms=arms, depths=[540], decode_tokens=4, rounds=1)
    assert result.decode.test == "tg4 @ d540"
    with pytest.raises(CapacityError, match=r"at most 540 tokens beside 4 .* got 541"):
        next(run_bench(llm, arms=arms, depths=[541], decode_tokens=4, rounds=1))


@pytest.mark.parametrize(
    "wrong", [{"depths": []}, {"depths": [0]}, {"decode_tokens": 0}, {"rounds": 0}, {"arms": []}]
)
def test_nothing_to_measure_is_refused(llm: LLM, wrong: dict[str, object]) -> None:
    asked: dict[str, object] = {"depths": [40], "decode_tokens": 1, "rounds": 1}
    asked["arms"] = parse_arms(["exact"])
    with pytest.raises(ConfigError, match="expected"):
        next(run_bench(llm, **{**asked, **wrong}))  # type: ignore[arg-type]


def test_a_model_without_a_vocabulary_reads_random_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate, prompts = LLM.generate, []

    def heard(self: LLM, prompt, *args, **more):  # type: ignore[no-untyped-def]
        prompts.append(prompt)
        return generate(self, prompt, *args, **more)

    monkeypatch.setattr(LLM, "generate", heard)
    path = write_tiny_gguf(tmp_path / "tiny.gguf", architecture="qwen3", no_vocab=True)
    arms = parse_arms(["exact", "sparse:k=3,tail=0"])
    with LLM(path, backend="reference") as llm:
        results = list(run_bench(llm, arms=arms, depths=[150], decode_tokens=2, rounds=2))
    assert [result.prefill.test for result in results] == ["pp150", "pp150"]
    # A warm-up for each arm, then every round: the same ids.
    assert [len(prompt) for prompt in prompts] == [150] * 6
    assert len({tuple(prompt) for prompt in prompts}) == 1
    assert 0 <= min(prompts[0]) < max(prompts[0]) < llm.config.vocab_size
    assert len(set(prompts[0])) > 75
