import io
import json
import re
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Run

JSON_KEYS = {
    "text", "token_ids", "prompt_tokens", "completion_tokens", "finish_reason", "timings",
    "attention", "model", "isa", "threads", "version",
}  # fmt: skip


def as_json(on_tiny: Run, *arguments: str) -> dict:
    ran = on_tiny("generate", "--json", *arguments)
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_text_goes_to_stdout_and_a_line_about_the_run_to_stderr(on_tiny: Run) -> None:
    ran = on_tiny("generate", "-p", "the key", "-n", "5")
    assert ran.code == 0
    assert ran.out.endswith("\n")
    assert ran.err.startswith("[exact | prompt ")
    assert "reply 5 tokens" in ran.err
    assert ran.err.rstrip().endswith("| length]")
    assert ran.out == as_json(on_tiny, "-p", "the key", "-n", "5")["text"] + "\n"


def test_json_is_one_object_with_the_agreed_keys(on_tiny: Run) -> None:
    result = as_json(on_tiny, "-p", "the key", "-n", "5")
    assert set(result) == JSON_KEYS
    assert result["completion_tokens"] == len(result["token_ids"]) == 5
    assert result["attention"]["mode"] == "exact"
    assert result["timings"]["prompt_n"] == result["prompt_tokens"]


def test_prompt_comes_from_a_file_or_stdin_without_its_last_line_break(
    on_tiny: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = as_json(on_tiny, "-p", "the\nkéy", "-n", "4")
    path = tmp_path / "prompt.txt"
    path.write_bytes("the\nkéy\n".encode())
    assert as_json(on_tiny, "-f", str(path), "-n", "4")["token_ids"] == direct["token_ids"]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("the\nkéy".encode())))
    piped = as_json(on_tiny, "-f", "-", "-n", "4")
    assert piped["prompt_tokens"] == direct["prompt_tokens"]


def test_a_file_that_is_no_text_is_refused(on_tiny: Run, tmp_path: Path) -> None:
    path = tmp_path / "prompt.bin"
    path.write_bytes(b"abc\xff")
    ran = on_tiny("generate", "-f", str(path))
    assert ran.code == 2
    assert "0xff at offset 3" in ran.err


def test_short_names_of_several_letters_reach_the_cache(on_tiny: Run) -> None:
    tokens = {
        name: as_json(on_tiny, "-p", "a key is a pass", "-n", "6", *options)["token_ids"]
        for name, options in {
            "short": ["-ctk", "q4_0", "-ctv", "q4_0"],
            "equals": ["-ctk=q4_0", "-ctv=q4_0"],
            "long": ["--cache-type-k", "q4_0", "--cache-type-v", "q4_0"],
            "alias": ["--kv-q4"],
        }.items()
    }
    assert len({tuple(ids) for ids in tokens.values()}) == 1


def test_cache_types_are_handed_on_as_given(on_tiny: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvsieve.engine.llm import LLM

    seen: list[object] = []
    make = LLM.__init__

    def spy(self: LLM, *args, **more) -> None:  # type: ignore[no-untyped-def]
        seen.append((more["cache_type"], more["ctx_size"], more["threads"]))
        make(self, *args, **more)

    monkeypatch.setattr(LLM, "__init__", spy)
    on_tiny("generate", "-p", "x", "-n", "1", "-ctk", "f16", "-c", "100", "-t", "1")
    on_tiny("generate", "-p", "x", "-n", "1", "-ctv", "f32")
    on_tiny("generate", "-p", "x", "-n", "1", "--kv-q4")
    assert seen == [
        (("f16", "q8_0"), 100, 1),
        (("q8_0", "f32"), None, None),
        (("q4_0", "q4_0"), None, None),
    ]


def test_sparse_runs_sparsely_and_says_so(on_tiny: Run) -> None:
    options = ["-p", "key, " * 120, "-n", "4", "--sparse-attn", "--sparse-k", "3"]
    options += ["--sparse-selector", "even", "--sparse-share", "group", "--sparse-dense-tail", "0"]
    attention = as_json(on_tiny, *options)["attention"]
    assert (attention["mode"], attention["k"]) == ("sparse", 3)
    assert (attention["selector"], attention["share"]) == ("even", "group")
    assert attention["density"]["prefill"] < 1
    assert attention["density"]["decode"] < 1
    assert attention["exact_because"] is None
    assert on_tiny("generate", *options).err.startswith("[sparse even k=3 (density: prompt 0.")


def test_a_sparse_run_that_stayed_exact_says_why(on_tiny: Run) -> None:
    ran = on_tiny("generate", "-p", "the key", "-n", "3", "--sparse-attn")
    assert ran.err.startswith(
        "[asked for sparse, ran exactly: the only block fits the budget of 32"
    )


def test_minus_one_runs_until_the_context_is_full(on_tiny: Run) -> None:
    result = as_json(on_tiny, "-p", "x", "-n", "-1", "--ignore-eos", "-c", "64")
    assert result["finish_reason"] == "length"
    # The last token needs no place of its own.
    assert result["prompt_tokens"] + result["completion_tokens"] == 65


def test_stop_ends_the_text_before_it(on_tiny: Run) -> None:
    whole = as_json(on_tiny, "-p", "the key", "-n", "12")["text"]
    stop = whole[4:6]
    stopped = as_json(on_tiny, "-p", "the key", "-n", "12", "--stop", "never", "--stop", stop)
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == whole[: whole.index(stop)]


def test_a_seed_repeats_a_drawn_reply_and_is_named(on_tiny: Run) -> None:
    options = ["-p", "the key", "-n", "10", "--temp", "30", "--top-k", "0", "--top-p", "1"]
    options += ["--min-p", "0"]
    first = on_tiny("generate", *options)
    seed = re.search(r"seed (\d+)\]", first.err)
    assert seed is not None
    assert on_tiny("generate", *options, "-s", seed.group(1)).out == first.out
    assert on_tiny("generate", *options, "-s", "1").out != first.out


def test_chat_goes_through_the_template(on_tiny: Run) -> None:
    chat = as_json(on_tiny, "--chat", "-p", "the key", "-n", "1")
    # <|im_start|>user, the prompt <|im_end|>, <|im_start|>assistant: three special tokens more.
    plain = as_json(on_tiny, "-p", "user\nthe key\nassistant\n", "-n", "1")
    assert chat["prompt_tokens"] == plain["prompt_tokens"] + 3


def test_profile_prints_the_original_s_lines(on_tiny: Run) -> None:
    ran = on_tiny("generate", "-p", "the key", "-n", "3", "--profile")
    lines = [line for line in ran.err.splitlines() if line.startswith(("[PREFILL", "[DEC"))]
    number = r"\d+\.\d+"
    prefill = rf"\[PREFILL-TIMING\] n=(\d+) total={number}ms gemm={number}% attn={number}% "
    assert (first := re.fullmatch(prefill + rf"select={number}%", lines[0]))
    decode = rf"\[DEC-SINGLE\] n=(\d+) total={number}ms attn={number}ms select={number}ms "
    steps = [re.fullmatch(decode + rf"gemm={number}ms", line) for line in lines[1:]]
    seen = [int(step.group(1)) for step in steps if step]
    assert seen == [int(first.group(1)) + 1, int(first.group(1)) + 2]


def test_an_empty_prompt_starts_from_bos(on_tiny: Run) -> None:
    assert as_json(on_tiny, "-p", "", "-n", "1")["prompt_tokens"] == 1
