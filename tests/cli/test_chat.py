"""``kvsieve chat``: what is read from a pipe is a conversation too."""

import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.test_app import PROGRAM


def talk(model: Path, *lines: str, options: tuple[str, ...] = ()) -> tuple[str, str, int]:
    command = [*PROGRAM, "chat", "-m", str(model), "--backend", "reference", "--temp", "0"]
    ran = subprocess.run(
        [*command, "-n", "8", *options],
        input="".join(f"{line}\n" for line in lines),
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.stdout, ran.stderr, ran.returncode


def test_a_conversation(model: Path) -> None:
    out, err, code = talk(
        model, "the key", "", "/stats", "and\\", "now", "/stats", "/exit", "never"
    )
    assert code == 0
    # Answers and nothing else, a line each at least, are what a pipe behind the program gets.
    assert out.count("\n") >= 2
    assert "/help says" in err
    first, second = [line for line in err.splitlines() if "prompt tokens were cached" in line]
    assert first.startswith("0 of ")
    # The second answer has the first turn in front of it, and finds it in the cache.
    assert int(second.split(" of ")[0]) > 0
    assert "exact" in err


def test_forgetting(model: Path) -> None:
    _, err, code = talk(model, "/stats", "the key", "/clear", "the key", "/stats")
    assert code == 0
    assert "nothing was answered yet" in err
    assert "the conversation is forgotten" in err
    stats = [line for line in err.splitlines() if "prompt tokens were cached" in line][-1]
    alone, other, _ = talk(model, "the key", "/stats")
    del alone
    assert stats.split(" of ")[1].split()[0] in other


def test_words_that_are_no_commands_get_help(model: Path) -> None:
    out, err, code = talk(model, "/what", "/help")
    assert (out, code) == ("", 0)
    assert err.count("/clear   forget") == 2


def test_a_conversation_that_no_longer_fits_goes_on_without_its_last_message(model: Path) -> None:
    out, err, code = talk(model, "x" * 600, "the key", "/stats")
    assert code == 0
    assert "expected at most 544 tokens" in err
    assert "/clear begins anew" in err
    assert "prompt tokens were cached" in err
    assert out


def test_what_the_model_is_told_first(model: Path) -> None:
    _, err, _ = talk(model, "x", "/stats", options=("--system", "the pass key is 12345"))
    longer = next(line for line in err.splitlines() if "prompt tokens were cached" in line)
    _, err, _ = talk(model, "x", "/stats")
    shorter = next(line for line in err.splitlines() if "prompt tokens were cached" in line)
    assert int(longer.split(" of ")[1].split()[0]) > int(shorter.split(" of ")[1].split()[0])


@pytest.mark.parametrize("when", ["answering", "waiting"])
def test_ctrl_c_stops_an_answer_only(model: Path, when: str) -> None:
    command = [*PROGRAM, "chat", "-m", str(model), "--backend", "reference", "--temp", "5"]
    child = subprocess.Popen(
        [*command, "-n", "-1"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell that runs tests in the background has told its children to ignore Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stderr is not None
    assert "/help" in child.stderr.readline()
    if when == "answering":
        child.stdin.write("the key\n")
        child.stdin.flush()
        assert child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        while child.stderr.readline().strip() not in ("stopped", "ended by the limit of tokens"):
            pass
    else:
        child.send_signal(signal.SIGINT)
        assert child.stderr.readline().strip() == ""
        assert "leaves" in child.stderr.readline()
    child.stdin.write("/stats\n/exit\n")
    _, err = child.communicate()
    assert child.returncode == 0
    assert ("prompt tokens were cached" in err) == (when == "answering")
