import pytest

from kvsieve.evals.corpus import PasskeyPrompt
from peers import rounds as module
from peers.arms import ArmError, Prompt
from peers.rounds import Rounds, rotated, run_seconds
from tests.benchmarks.comparisons import speed


class FakeArm:
    version, is_peer, prompts_per_run = "1", True, 1

    def __init__(self, name, log, *, fails_at=(), reply=None):
        self.name, self._log, self._fails_at, self._reply = name, log, fails_at, reply

    def measure(self, prompt, decode_tokens):
        self._log.append((len(prompt.token_ids), self.name))
        if len(prompt.token_ids) in self._fails_at:
            raise ArmError("out of memory")
        return speed(1.0, 10.0, prompt_tokens=len(prompt.token_ids))

    def answer(self, prompt, max_tokens):
        return self._reply


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(module, "SETTLE_S", 0)


def prompts(*depths):
    return {depth: Prompt(token_ids=[0] * depth, text=None) for depth in depths}


def test_the_order_rotates():
    log = []
    rounds = Rounds([FakeArm(name, log) for name in "abc"], decode_tokens=4)
    speeds = rounds.time_all(prompts(8), 3)
    assert "".join(name for _, name in log) == "abcbcacab"
    assert [len(runs) for runs in speeds[8].values()] == [3, 3, 3]


def test_rotation_goes_round():
    assert [rotated("ab", by) for by in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_an_arm_that_fails_at_a_depth_is_left_out_of_it_alone(capsys):
    log = []
    arms = [FakeArm("good", log), FakeArm("bad", log, fails_at={16})]
    rounds = Rounds(arms, decode_tokens=4)
    speeds = rounds.time_all(prompts(8, 16), 2)
    assert {depth: sorted(by_arm) for depth, by_arm in speeds.items()} == {
        8: ["bad", "good"],
        16: ["good"],
    }
    assert log.count((16, "bad")) == 1
    assert rounds.left_out == ["bad at 16: out of memory"]
    assert "left out bad at 16: out of memory" in capsys.readouterr().err


def test_an_arm_that_cannot_warm_up_is_gone():
    arms = [FakeArm("bad", [], fails_at={8}), FakeArm("good", [])]
    rounds = Rounds(arms, decode_tokens=4)
    rounds.warm_up(prompts(8)[8])
    assert [arm.name for arm in rounds.arms] == ["good"]


def test_the_estimate_grows_with_what_is_run():
    warm = speed(0.5, 10.0, prompt_tokens=500)  # 1 ms per token of the prompt
    assert run_seconds(warm, 4000, decode_tokens=100) == pytest.approx(2 * (4.0 + 1.0))
    assert run_seconds(warm, 4000, decode_tokens=100, prompts_per_run=2) == pytest.approx(18.0)


def test_replies_are_judged_and_timers_not_asked():
    arms = [
        FakeArm("right", [], reply=" 12345. It"),
        FakeArm("wrong", [], reply="99999, not 12345"),
        FakeArm("timed only", []),
    ]
    question = PasskeyPrompt(text="...", token_ids=[1, 2], context_tokens=1, key="12345", depth=0.5)
    answers = Rounds(arms, decode_tokens=4).ask_all([question])
    assert [(answer.engine, answer.hit) for answer in answers] == [
        ("right", True),
        ("wrong", False),
    ]
