"""From the words of `--arms` to engines that are ready to run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvsieve import LLM, SparseAttention
from peers.arms import Arm, ArmError, KvsieveArm
from peers.ik import IkArm
from peers.worker import Worker, WorkerArm

SPARSE = SparseAttention(k=32, selector="even", share="group")

DEFAULT_ARMS = ("exact", "sparse", "llama-f16", "llama-q8_0", "ov", "ov-xattention", "ik-q8_0")
ALL_ARMS = (*DEFAULT_ARMS, "ov-trishape", "ik-f16")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the arms are made from; `vocabulary`: whether the model file has one."""

    llm: LLM
    model: Path
    vocabulary: bool
    threads: int
    llama_python: str
    openvino_python: str
    openvino_batch: int
    ik_bin: Path | None


def build_arms(
    names: Sequence[str], setup: Setup, on_left_out: Callable[[str, str], None]
) -> list[Arm]:
    """The arms that could be made; `on_left_out` hears the name of each other one, and why."""
    arms: list[Arm] = []
    for name in names:
        try:
            arms.append(_make(name, setup))
        except ArmError as error:
            on_left_out(name, str(error))
    return arms


def _make(name: str, setup: Setup) -> Arm:
    engine, _, variant = name.partition("-")
    if engine == "exact":
        return KvsieveArm(setup.llm, "kvsieve exact", None)
    if engine == "sparse":
        return KvsieveArm(setup.llm, f"kvsieve sparse k={SPARSE.k}", SPARSE)
    if engine == "llama":
        return _llama_cpp(variant, setup)
    if engine == "ov":
        return _openvino(variant.upper() or None, setup)
    if setup.ik_bin is None:
        raise ArmError("no --ik-bin was given")
    return IkArm(setup.ik_bin, setup.model, cache_type=variant, threads=setup.threads)


def _llama_cpp(cache_type: str, setup: Setup) -> Arm:
    settings = {
        "model": str(setup.model),
        "threads": setup.threads,
        "cache_type": cache_type,
    }
    worker = Worker(setup.llama_python, "llama_cpp_worker.py", settings)
    return WorkerArm(f"llama.cpp {cache_type}", worker)


def _openvino(sparse_mode: str | None, setup: Setup) -> Arm:
    if not setup.vocabulary:
        raise ArmError("it takes text, and the model file has no vocabulary")
    settings = {
        "model": str(setup.model),
        "threads": setup.threads,
        "sparse_mode": sparse_mode,
        "batch": setup.openvino_batch,
    }
    worker = Worker(setup.openvino_python, "openvino_worker.py", settings)
    return WorkerArm(f"OpenVINO {sparse_mode or 'exact'}", worker)
