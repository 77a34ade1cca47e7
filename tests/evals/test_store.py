import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvsieve.errors import ConfigError
from kvsieve.evals.store import Identity, ResultStore

WHO = Identity(model="tiny", fingerprint="ab12", version="0.1.0", cache_type="q8_0")
ROW = {"attn": "exact", "setting": "any", "length": 5, "hit": True, "density": None}


def test_rows_come_back_as_they_went_in_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    with ResultStore.create(path, WHO) as store:
        store.add("b", {**ROW, "length": 7}, task="kv", seconds=1.0)
        store.add("a", ROW, task="kv", seconds=1.0)
        assert store.has("a")
        assert not store.has("c")
    with ResultStore.read(path) as store:
        assert store.identity == WHO
        assert store.rows("kv") == [{**ROW, "length": 7}, ROW]
        assert (store.rows("copy"), store.tasks()) == ([], ["kv"])


@pytest.mark.parametrize(
    "changed",
    [{"fingerprint": "cd34"}, {"version": "0.2.0"}, {"cache_type": "f16"}, {"model": "small"}],
)
def test_results_of_another_model_cache_or_version_never_mix(
    tmp_path: Path, changed: dict[str, str]
) -> None:
    path = tmp_path / "results.db"
    ResultStore.create(path, WHO).close()
    ResultStore.create(path, WHO).close()
    other = replace(WHO, **changed)
    with pytest.raises(ConfigError, match="never mix") as caught:
        ResultStore.create(path, other)
    assert str(WHO) in str(caught.value)
    assert str(other) in str(caught.value)


def test_what_is_no_file_of_results_is_named(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database, " * 100)
    for make in (lambda: ResultStore.create(text, WHO), lambda: ResultStore.read(text)):
        with pytest.raises(ConfigError, match=r"notes.txt: expected a file that .* wrote"):
            make()
    with pytest.raises(ConfigError, match="expected a file that a sweep wrote"):
        ResultStore.read(tmp_path / "missing.db")
    with pytest.raises(ConfigError, match="expected a folder"):
        ResultStore.create(tmp_path / "no" / "results.db", WHO)
    (tmp_path / "empty.db").touch()
    with pytest.raises(ConfigError, match="expected a file that"):
        ResultStore.read(tmp_path / "empty.db")


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs kill -9")
def test_a_row_is_on_disk_before_the_next_even_if_the_process_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "results.db"
    script = (
        "import os, signal\nfrom pathlib import Path\n"
        "from kvsieve.evals.store import Identity, ResultStore\n"
        f"store = ResultStore.create(Path({str(path)!r}), Identity(**{vars(WHO)!r}))\n"
        f"store.add('a', {ROW!r}, task='kv', seconds=1.0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], env=dict(os.environ), check=False)
    assert ran.returncode == -signal.SIGKILL
    with ResultStore.create(path, WHO) as store:
        assert store.rows("kv") == [ROW]
