"""Models of the Hub, from a local cache laid out as the library lays it out; no network."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import RepositoryNotFoundError

from kvsieve.engine import hub
from kvsieve.engine.hub import HubModel, download
from kvsieve.engine.llm import LLM
from kvsieve.errors import ConfigError, ModelFileError
from tests.checkpoints import write_folder, write_gguf

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; whoever asks the network for anything fails."""

    def no_network(*_: Any, **__: Any) -> Any:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("httpx.Client.send", no_network)
    return tmp_path / "hub"


def snapshot(cache: Path, repo: str) -> Path:
    """The folder of a repository's files, which `refs/main` names."""
    root = cache / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    folder = root / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    return folder


def test_a_folder_of_the_cache_runs(cache: Path) -> None:
    write_folder(snapshot(cache, "some/tiny-llama"), "llama")
    with LLM("hf:some/tiny-llama", offline=True) as llm:
        assert llm.config.num_layers == 2
        assert len(llm.generate([1, 2, 3]).token_ids) >= 1


@pytest.mark.parametrize("file", ["", "tiny-q8_0.gguf", "Q8_0", "q8"])
def test_the_only_gguf_and_one_by_a_part_of_its_name(cache: Path, file: str) -> None:
    folder = snapshot(cache, "some/tiny-gguf")
    path = write_gguf(
        folder / "tiny-Q8_0.gguf" if file != "tiny-q8_0.gguf" else folder / file, "qwen3"
    )
    (folder / "mmproj-tiny-F16.gguf").write_bytes(b"an image tower")
    if file:
        write_gguf(folder / "tiny-F16.gguf", "qwen3")
    assert download(HubModel(repo="some/tiny-gguf", file=file), offline=True) == path


def test_several_files_must_be_told_apart(cache: Path) -> None:
    folder = snapshot(cache, "some/several")
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        (folder / name).write_bytes(b"x")
    for file, words in (
        ("", "a model folder, or :file behind the name to choose, got a-Q4_0.gguf, a-Q8_0.gguf"),
        ("Q", "expected one file that 'Q' names, got a-Q4_0.gguf, a-Q8_0.gguf"),
        ("Q5", "expected one file that 'Q5' names, got a-Q4_0.gguf, a-Q8_0.gguf"),
    ):
        with pytest.raises(ConfigError, match=words):
            download(HubModel(repo="some/several", file=file), offline=True)
    (snapshot(cache, "some/none") / "README.md").write_text("x")
    with pytest.raises(ConfigError, match="got no GGUF file and no safetensors"):
        download(HubModel(repo="some/none"), offline=True)


def test_what_is_not_in_the_cache(cache: Path) -> None:
    with pytest.raises(ModelFileError, match=r"\[hub\] some/absent: expected .*in the local cache"):
        download(HubModel(repo="some/absent"), offline=True)
    with pytest.raises(ModelFileError, match=r"\[hub\] some/\.\.: expected a repository"):
        download(HubModel(repo="some/.."), offline=True)


@pytest.mark.parametrize(
    "text", ["", "llama", "a/b/c", "/b", "a/", "a/b:", "a/b:../c", "a/b:/etc/x"]
)
def test_names_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\[hub\] (model|file): expected"):
        HubModel.parse(text)


def test_names() -> None:
    assert HubModel.parse("user/repo") == HubModel(repo="user/repo")
    assert HubModel.parse("u/r:Q4_K_M") == HubModel(repo="u/r", file="Q4_K_M")


def test_online_the_repository_is_asked_and_only_what_is_needed_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: dict[str, Any] = {}

    def fetch(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        return str(tmp_path)

    files = ["config.json", "model.safetensors", "pytorch_model.bin", "original/x.pth"]
    monkeypatch.setattr(huggingface_hub, "list_repo_files", lambda repo: files)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert download(HubModel(repo="u/r")) == tmp_path
    assert (asked["repo"], asked["local_files_only"]) == ("u/r", False)
    assert "tokenizer.json" in asked["allow_patterns"]
    assert not any(pattern.endswith((".bin", ".pth")) for pattern in asked["allow_patterns"])

    files[:] = ["a.gguf", "README.md"]
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: f"{a} {k}")
    got = str(download(HubModel(repo="u/r")))
    assert "'u/r', 'a.gguf'" in got
    assert "'local_files_only': False" in got


def test_a_repository_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    class Answer:
        headers: dict[str, str] = {}  # noqa: RUF012
        request = None

    def refuse(repo: str) -> list[str]:
        raise RepositoryNotFoundError(f"404: {repo}\nand more", response=Answer())  # type: ignore[arg-type]

    monkeypatch.setattr(huggingface_hub, "list_repo_files", refuse)
    with pytest.raises(ModelFileError, match=r"\[hub\] u/r: expected .*reached, got: 404: u/r$"):
        download(HubModel(repo="u/r"))


def test_the_hub_is_left_alone_by_other_models() -> None:
    assert hub.PREFIX == "hf:"
    with pytest.raises(ModelFileError, match="which does not exist"):
        LLM("user/repo")
