import sys

import pytest

from peers import worker as module
from peers.arms import ArmError, Prompt, Speed
from peers.worker import Worker, WorkerArm

ENGINE = """
import sys
sys.path.insert(0, {workers!r})
from json_lines import serve

class Engine:
    def measure(self, *, token_ids, text, decode_tokens):
        print("a library that prints")
        return dict(prompt_tokens=len(token_ids), prefill_s=0.5, decode_ms=float(decode_tokens))

    def answer(self, *, token_ids, text, max_tokens):
        if text == "die":
            sys.exit("out of luck")
        raise ValueError("no\\nwords")

serve(lambda settings: (Engine(), settings["version"]))
"""


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    (tmp_path / "engine.py").write_text(ENGINE.format(workers=str(module.SCRIPTS)))
    (tmp_path / "absent.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.setattr(module, "SCRIPTS", tmp_path)


@pytest.fixture
def arm(scripts):
    arm = WorkerArm("an engine", Worker(sys.executable, "engine.py", {"version": "7"}))
    yield arm
    arm.close()


def test_figures_come_through_what_the_library_prints(arm):
    assert arm.version == "7"
    speed = arm.measure(Prompt(token_ids=[1, 2, 3], text="é"), 4)
    assert speed == Speed(prompt_tokens=3, prefill_s=0.5, decode_ms=4.0)


def test_an_error_is_one_line_and_the_process_lives(arm):
    prompt = Prompt(token_ids=[1], text="x")
    with pytest.raises(ArmError, match=r"^ValueError: no$"):
        arm.answer(prompt, 4)
    assert arm.measure(prompt, 4).prompt_tokens == 1


def test_the_end_of_the_process_is_told_with_its_last_words(arm):
    prompt = Prompt(token_ids=[1], text="die")
    for _ in range(2):
        with pytest.raises(ArmError, match="out of luck"):
            arm.answer(prompt, 4)


def test_a_missing_package_is_named(scripts):
    with pytest.raises(ArmError, match="a_package_that_nobody_has"):
        Worker(sys.executable, "absent.py", {})


def test_a_missing_interpreter_is_named(scripts, tmp_path):
    with pytest.raises(ArmError, match="No such file"):
        Worker(str(tmp_path / "python"), "engine.py", {})
