"""Default thread counts from a made-up machine."""

import os

import pytest

from kvsieve.kernels.threads import default_threads


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Builds /sys trees: `siblings` and `capacity` per CPU, and a cgroup quota."""

    def build(siblings, capacity=None, cpu_max=None, allowed=None):
        for cpu, group in enumerate(siblings):
            topology = tmp_path / f"cpu{cpu}" / "topology"
            topology.mkdir(parents=True)
            (topology / "thread_siblings_list").write_text(group + "\n")
            if capacity:
                (tmp_path / f"cpu{cpu}" / "cpu_capacity").write_text(f"{capacity[cpu]}\n")
        if cpu_max:
            (tmp_path / "cpu.max").write_text(cpu_max)
        cpus = set(range(len(siblings))) if allowed is None else allowed
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: cpus, raising=False)
        return default_threads(cpus=tmp_path, cgroup=tmp_path)

    return build


def test_hyper_threads_count_once(machine):
    assert machine(["0,2", "1,3", "0,2", "1,3"]) == 2


def test_slow_cores_of_an_arm_board_are_left_out(machine):
    slow_then_fast = [420] * 4 + [1024] * 4
    assert machine([str(i) for i in range(8)], capacity=slow_then_fast) == 4


def test_only_cpus_of_the_affinity_count(machine):
    assert machine([str(i) for i in range(8)], allowed={2, 5, 7}) == 3


@pytest.mark.parametrize(
    ("cpu_max", "threads"),
    [("200000 100000", 2), ("150000 100000", 2), ("50000 100000", 1), ("max 100000", 8)],
)
def test_a_cgroup_quota_limits_it(machine, cpu_max, threads):
    assert machine([str(i) for i in range(8)], cpu_max=cpu_max) == threads


def test_nothing_readable_still_gives_the_affinity(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2}, raising=False)
    assert default_threads(cpus=tmp_path / "none", cgroup=tmp_path / "none") == 3
