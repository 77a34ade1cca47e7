"""``kvsieve serve`` as a program: its options, and one whole run."""

import json
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from kvsieve.cli.options import DrawingOptions
from kvsieve.cli.serve_options import (
    BatchOptions,
    ListenOptions,
    SafetyOptions,
    server_config,
)
from kvsieve.cli.sparse_options import SparseOptions
from kvsieve.engine.hub import HubModel
from kvsieve.server.run import HttpServer
from tests.cli.conftest import Run
from tests.cli.test_app import PROGRAM, assert_one_line_of_error


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--port", "70000"], ["port", "70000"]),
        (["--port", "x"], ["--port", "'x'"]),
        (["--sse-ping-interval", "0"], ["ping_s", "0"]),
        (["--timeout", "-1"], ["send_s", "-1"]),
        (["--drain-timeout", "nan"], ["drain_s", "nan"]),
        (["--body-limit", "0"], ["body_bytes", "0"]),
        (["--api-key", "a,,b"], ["api_keys"]),
        (["--api-key-file", "no/such/file"], ["no/such/file"]),
        (["--cors-origins", "example.org"], ["cors_origins", "'example.org'"]),
        (["--slot-save-path", "no/such/folder"], ["--slot-save-path", "no/such/folder"]),
        (["--chat-template-file", "no/such/file"], ["no/such/file"]),
        (["--sparse-limit-k-max", "8"], ["max_k", "8"]),
        (["--sparse-limit-k-min", "0"], ["min_k", "0"]),
        (
            ["--sparse-attn", "--sparse-limit-k-min", "9", "--sparse-limit-k-max", "8"],
            ["max_k", "9", "8"],
        ),
        (["--ssl-key-file", "key.pem"], ["ssl_cert_file"]),
        (["--sparse-k", "8"], ["--sparse-attn"]),
        (["--temp", "-1"], ["temperature", "-1"]),
        (["--top-p", "2"], ["top_p", "2"]),
        (["-n", "-5"], ["-5"]),
        (["-np", "0"], ["--parallel", "0"]),
        (["--max-queue", "-1"], ["--max-queue", "-1"]),
        (["--cache-ram", "-1"], ["--cache-ram", "-1"]),
        (["--max-prefill-share", "2"], ["share", "2"]),
        (["--host", "no such host"], ["host", "'no such host'"]),
        (["-m", "no/such.gguf"], ["no/such.gguf"]),
    ],
)
def test_bad_options_are_one_line(
    run: Run,
    model: Path,
    arguments: list[str],
    named: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A server that should not have started would be waited for.
    monkeypatch.setattr(HttpServer, "run", _not_to_be_run)
    given = ["--backend", "reference", *([] if "-m" in arguments else ["-m", str(model)])]
    assert_one_line_of_error(run("serve", *given, *arguments), *named)


def _not_to_be_run(_server: HttpServer) -> None:
    raise AssertionError("the server started")


@pytest.mark.parametrize(
    "arguments", [["-ctk", "q4_0", "-c", "0"], ["--cache-ram", "99999999"], ["-hf", "a/b"]]
)
def test_what_only_loading_finds_wrong_is_one_line_too(
    run: Run, model: Path, arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server listens already, and ends."""
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(model.read_bytes()[:3000])

    def fetch(asked: HubModel, *, offline: bool = False) -> Path:
        assert (asked.repo, offline) == ("a/b", False)
        return broken

    monkeypatch.setattr("kvsieve.engine.hub.download", fetch)
    source = (
        [] if "-hf" in arguments else ["-m", str(model if "--cache-ram" in arguments else broken)]
    )
    ran = run("serve", "--backend", "reference", "--port", "0", *source, *arguments)
    assert_one_line_of_error(ran)


def test_keys_come_from_both_places(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("  one \n\ntwo\n")
    options = SafetyOptions(api_key=["a,b", "c"], api_key_file=str(file))
    assert options.keys() == ("a", "b", "c", "one", "two")
    file.write_text("\n")
    with pytest.raises(ValueError, match="expected a key on a line"):
        SafetyOptions(api_key_file=str(file)).keys()


def test_options_become_settings() -> None:
    config = server_config(
        ListenOptions(port=0, alias="a"),
        SafetyOptions(
            cors_origins="https://a.example/, http://b", sparse_limit_k_max=64, body_limit=2
        ),
        BatchOptions(parallel=2, max_queue=5),
        sampling=DrawingOptions(temp=0.5, predict=100),
        sparse=SparseOptions(sparse_attn=True, sparse_k=16),
    )
    assert config.cors_origins == ("https://a.example", "http://b")
    assert config.limits.body_bytes == 2 * 1024 * 1024
    assert (config.limits.choices, config.limits.prompts) == (7, 7)
    assert (config.sampling.temperature, config.sampling.n_predict) == (0.5, 100)
    assert config.sparse.default is not None
    assert (config.sparse.default.k, config.sparse.max_k) == (16, 64)


def start(*arguments: str) -> "tuple[subprocess.Popen[str], str, str]":
    """A server, its address, and what it said before it named that."""
    child = subprocess.Popen(
        [*PROGRAM, "serve", "--port", "0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stderr is not None
    said = ""
    while " at http://" not in (line := child.stderr.readline()):
        assert line, said
        said += line
    return child, line.split(" at ")[1].strip(), said


def test_a_whole_run(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template"
    template.write_text("{{ messages[0].content }}!")
    child, url, said = start(
        *("-m", str(model), "--backend", "reference", "-a", "mine", "-n", "3"),
        *("--chat-template-file", str(template)),
    )
    try:
        body = json.dumps({"messages": [{"role": "user", "content": "the key"}]}).encode()
        with urllib.request.urlopen(f"{url}/v1/chat/completions", body) as reply:
            answer = json.load(reply)
        assert answer["model"] == "mine"
        assert answer["usage"]["completion_tokens"] == 3
        with urllib.request.urlopen(f"{url}/apply-template", body) as reply:
            assert json.load(reply) == {"prompt": "the key!"}
    finally:
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate()
    assert (child.returncode, out, said, err) == (0, "", "", "")


def test_a_template_that_does_not_compile_is_one_line(
    run: Run, model: Path, tmp_path: Path
) -> None:
    template = tmp_path / "template"
    template.write_text("{% if %}")
    ran = run(
        *("serve", "-m", str(model), "--backend", "reference", "--port", "0"),
        *("--chat-template-file", str(template)),
    )
    assert_one_line_of_error(ran, "ChatTemplate")


def test_everybody_may_come_in_is_a_warning(model: Path) -> None:
    arguments = ["-m", str(model), "--backend", "reference", "--host", "0.0.0.0"]
    for more, warns in (([], True), (["--api-key", "k"], False)):
        child, _, said = start(*arguments, *more)
        child.send_signal(signal.SIGTERM)
        child.communicate()
        assert ("warning: anyone who can reach" in said) == warns
        assert child.returncode == 0
