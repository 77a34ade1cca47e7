"""ik_llama.cpp by its llama-bench, which can be timed but not asked."""

import json
import subprocess
from pathlib import Path
from typing import Any

from peers.arms import ArmError, Prompt, Speed
from peers.worker import LIMIT_S, first_line


class IkArm:
    """One cache type. Every run is a process that loads the model; loading is not timed."""

    is_peer = True
    # For the prefill alone, then as what the decoded tokens look back at.
    prompts_per_run = 2

    def __init__(self, binary: Path, model: Path, *, cache_type: str, threads: int) -> None:
        if not binary.is_file():
            raise ArmError(f"{binary} is no file")
        self.name = f"ik_llama.cpp {cache_type}"
        self.version = "unknown build"
        self._command = [str(binary), "-m", str(model), "-t", str(threads), "-ngl", "0"]
        self._command += ["-fa", "1", "-ctk", cache_type, "-ctv", cache_type, "-rtr", "1"]
        self._command += ["-r", "1", "-o", "json"]

    def measure(self, prompt: Prompt, decode_tokens: int) -> Speed:
        depth = len(prompt.token_ids)
        tests = ["-p", str(depth), "-n", "0", "-gp", f"{depth},{decode_tokens}"]
        try:
            run = subprocess.run(
                [*self._command, *tests], capture_output=True, text=True, timeout=LIMIT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ArmError(first_line(str(error))) from error
        if run.returncode:
            raise ArmError(f"ended with code {run.returncode}: {first_line(run.stderr)}")
        speed, self.version = parse_llama_bench(run.stdout, depth=depth)
        return speed

    def answer(self, prompt: Prompt, max_tokens: int) -> str | None:
        return None

    def close(self) -> None:
        """Nothing stays between runs."""


def parse_llama_bench(output: str, *, depth: int) -> tuple[Speed, str]:
    """The two tests of a run (a prompt of `depth`, and decoding after it), and the build.

    Messages may stand before and after the JSON array. In the test of decoding, samples_ns leaves
    out the prompt that it first reads. Raises ArmError if one of the two is missing.
    """
    prefill, decode = None, None
    build = "unknown build"
    for record in _records(output):
        if record.get("n_prompt") != depth:
            continue
        if record["n_gen"] == 0:
            prefill = record["samples_ns"][0] / 1e9
        else:
            decode = record["samples_ns"][0] / 1e6 / record["n_gen"]
        build = f"build {record['build_number']} ({record['build_commit']})"
    if not prefill or not decode:
        raise ArmError(f"llama-bench printed no figures for {depth} tokens")
    return Speed(prompt_tokens=depth, prefill_s=prefill, decode_ms=decode), build


def _records(output: str) -> list[dict[str, Any]]:
    start = output.find("[\n")
    try:
        records, _ = json.JSONDecoder().raw_decode(output[start:] if start >= 0 else "")
    except json.JSONDecodeError as error:
        raise ArmError(f"llama-bench printed no JSON: {error}") from error
    return list(records)
