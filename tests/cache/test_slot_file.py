import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvsieve.cache.block_pool import BlockPool
from kvsieve.cache.slot_file import SavedBlocks, read_slot, write_slot
from kvsieve.cache.snapshot import SelectorSnapshot
from kvsieve.errors import CapacityError, SlotFileError
from kvsieve.kernels.layout import PageLayout
from kvsieve.types import CacheType
from tests.contract.project import ROOT

LAYERS, KV_HEADS = 2, 3
FINGERPRINT = "00ff" * 4
PLENTY = 1 << 30


def make_pool(k_type: CacheType = "q8_0", layers: int = LAYERS) -> BlockPool:
    layout = PageLayout(k_type=k_type, v_type="q8_0", head_dim=32)
    return BlockPool(layout, num_layers=layers, num_kv_heads=KV_HEADS, num_blocks=1)


POOL = make_pool()


def some_blocks(num_tokens: int = 70, *, seed: int = 0) -> SavedBlocks:
    rng = np.random.default_rng(seed)
    num_blocks = -(-num_tokens // 32)
    shape = (num_blocks, LAYERS, KV_HEADS, POOL.layout.page_bytes)
    return SavedBlocks(
        ids=rng.integers(0, 999, num_tokens).astype(np.int32),
        origins=[b"exact"] * (num_blocks - 1) + [b"\x00sparse"],
        pages=rng.integers(0, 255, shape).astype(np.uint8),
        snapshots={
            (1, "kind"): SelectorSnapshot(
                since=0,
                num_tokens=64,
                first_group=0,
                index=rng.integers(0, 255, (LAYERS, 1, KV_HEADS, 40)).astype(np.uint8),
                importance=rng.integers(0, 2**40, (LAYERS, 64)),
            ),
            (0, "other"): SelectorSnapshot(
                since=0, num_tokens=32, first_group=0, index=None, importance=None
            ),
        },
    )


def read(path: Path, **changes: object) -> SavedBlocks:
    settings = {"pool": POOL, "fingerprint": FINGERPRINT, "max_bytes": PLENTY, **changes}
    saved, num_bytes = read_slot(path, **settings)  # type: ignore[arg-type]
    assert num_bytes == path.stat().st_size
    return saved


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "slot.bin"
    num_bytes = write_slot(target, some_blocks(), pool=POOL, fingerprint=FINGERPRINT)
    assert num_bytes == target.stat().st_size
    return target


def test_what_was_written_comes_back(path: Path):
    expected, found = some_blocks(), read(path)
    assert np.array_equal(found.ids, expected.ids)
    assert found.ids.dtype == np.int32
    assert found.origins == expected.origins
    assert np.array_equal(found.pages, expected.pages)
    assert set(found.snapshots) == {(1, "kind"), (0, "other")}
    one, other = found.snapshots[1, "kind"], expected.snapshots[1, "kind"]
    assert (one.since, one.num_tokens, one.first_group) == (0, 64, 0)
    assert np.array_equal(one.index, other.index)
    assert np.array_equal(one.importance, other.importance)
    assert found.snapshots[0, "other"].index is None
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_every_flipped_bit_and_every_cut_is_refused(path: Path):
    whole = path.read_bytes()
    rng = np.random.default_rng(1)
    for at in [*range(0, 40), *rng.integers(0, len(whole), 60), len(whole) - 1]:
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with pytest.raises(SlotFileError, match=r"^\[restore_slot\] .*slot\.bin: expected"):
            read(path)
    for length in [*range(0, 40), *rng.integers(0, len(whole), 50)]:
        path.write_bytes(whole[:length])
        with pytest.raises(SlotFileError, match=r"^\[restore_slot\] .*slot\.bin: expected"):
            read(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(SlotFileError, match="bytes, got"):
        read(path)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"fingerprint": "1234"}, "fingerprint 1234"),
        ({"pool": make_pool("f16")}, "k_type f16"),
        ({"pool": make_pool(layers=4)}, "num_layers 4"),
    ],
)
def test_a_file_of_another_model_or_cache_is_refused_by_name(
    path: Path, changes: dict[str, object], word: str
):
    with pytest.raises(SlotFileError, match=word):
        read(path, **changes)


def test_no_file_a_folder_and_another_file(tmp_path: Path):
    with pytest.raises(SlotFileError, match="No such file"):
        read(tmp_path / "none")
    with pytest.raises(SlotFileError, match="directory"):
        read(tmp_path)
    (tmp_path / "text").write_text("<html>" * 100)
    with pytest.raises(SlotFileError, match="a saved slot"):
        read(tmp_path / "text")


def test_more_than_the_cache_may_have_is_refused_before_it_is_read(path: Path):
    with pytest.raises(CapacityError, match="prefix cache may have"):
        read(path, max_bytes=1000)


def test_a_header_that_claims_too_much_is_refused(path: Path):
    whole = path.read_bytes()
    path.write_bytes(whole[:16] + (2**62).to_bytes(8, "little") + whole[24:])
    with pytest.raises(SlotFileError, match="a header within the file"):
        read(path)
    for old, new in (
        (b'"num_tokens": 70', b'"num_tokens": 99'),
        (b'"num_tokens": 70', b'"num_tokens": -9'),
        (b'"block": 1', b'"block": 7'),
        (b'"since": 0', b'"since": 9'),
        (b"[2, 1, 3, 40]", b"[9, 1, 3, 40]"),
        (b"[2, 64]", b"[2, 65]"),
        (b'"kind": "kind"', b'"what": "kind"'),
        (b"{", b"["),
    ):
        assert old in whole
        path.write_bytes(whole.replace(old, new, 1))
        with pytest.raises(SlotFileError):
            read(path)


def test_a_folder_that_is_not_there(tmp_path: Path):
    with pytest.raises(SlotFileError, match=r"\[save_slot\] .*gone"):
        write_slot(tmp_path / "gone" / "x", some_blocks(), pool=POOL, fingerprint=FINGERPRINT)


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    path: Path, monkeypatch: pytest.MonkeyPatch
):
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SlotFileError, match="No space left"):
        write_slot(path, some_blocks(seed=1), pool=POOL, fingerprint=FINGERPRINT)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]


WRITER = """
import sys
sys.path[:0] = sys.argv[2:]
from pathlib import Path
from tests.cache.test_slot_file import FINGERPRINT, POOL, some_blocks
from kvsieve.cache.slot_file import write_slot
saved = [some_blocks(20_000, seed=seed) for seed in (0, 1)]
print("ready", flush=True)
for number in range(10_000):
    write_slot(Path(sys.argv[1]), saved[number % 2], pool=POOL, fingerprint=FINGERPRINT)
"""


def test_a_writer_that_is_killed_leaves_a_whole_file_or_none(tmp_path: Path):
    path = tmp_path / "slot.bin"
    for after_first in (False, True):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(ROOT), str(ROOT / "src")],
            stdout=subprocess.PIPE,
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        while after_first and not path.exists():
            assert writer.poll() is None
            time.sleep(0.001)
        time.sleep(0.03)  # into the writing of one
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        if path.exists():
            assert len(read(path).ids) == 20_000
    assert path.exists()
