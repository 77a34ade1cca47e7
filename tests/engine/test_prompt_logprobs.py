"""Log probabilities of a prompt's own tokens."""

import numpy as np
import pytest

from kvsieve.engine.llm import LLM
from kvsieve.engine.outputs import TokenLogprobs
from kvsieve.engine.requests import PromptLogprobs, TokenEvent
from kvsieve.engine.sampling import SamplingParams
from kvsieve.errors import ConfigError
from tests.engine.serving import MODES, Client, MakeService, make_ids

PROMPT = make_ids(150, seed=1)
SCORED = SamplingParams(max_tokens=2, prompt_logprobs=2, ignore_eos=True)


def expected(llm: LLM, prompt: list[int], mode: str) -> list[tuple[float, list[int]]]:
    """Log probability of every token but the first, and the two most probable ones."""
    logits = llm.logits(prompt, sparse=MODES[mode]).astype(np.float64)
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    best = np.argsort(-logprobs, axis=1, kind="stable")[:, :2]
    return [(float(logprobs[i, prompt[i + 1]]), best[i].tolist()) for i in range(len(prompt) - 1)]


def check(scores: tuple[TokenLogprobs | None, ...], right: list[tuple[float, list[int]]]) -> None:
    assert scores[0] is None
    assert len(scores) == len(right) + 1
    for score, (logprob, best) in zip(scores[1:], right, strict=True):
        assert score is not None
        assert score.logprob == pytest.approx(logprob, abs=1e-9)
        assert [one.token_id for one in score.top] == best


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [1, 2, 32, 150])
def test_they_are_those_of_the_models_logits(served: LLM, mode: str, length: int):
    prompt = PROMPT[:length]
    done = served.generate(prompt, SCORED, sparse=MODES[mode])
    assert done.prompt_logprobs is not None
    check(done.prompt_logprobs, expected(served, prompt, mode))
    # Nothing else of the reply depends on whether they were asked for.
    plain = SamplingParams(max_tokens=2, ignore_eos=True)
    unscored = served.generate(prompt, plain, sparse=MODES[mode])
    assert (done.text, done.token_ids) == (unscored.text, unscored.token_ids)
    assert unscored.prompt_logprobs is None


def test_the_service_gives_them_before_the_first_token(make_service: MakeService, served: LLM):
    service = make_service()
    right = expected(served, PROMPT, "exact")
    # The second finds the first one's blocks in the prefix cache, and beside it others run.
    for round_ in range(2):
        clients = [
            Client(service, PROMPT, SCORED),
            Client(service, PROMPT),
            Client(service, make_ids(70, seed=round_)),
        ]
        for client in clients:
            client.wait()
        kinds = [type(event) for event in clients[0].events]
        assert kinds.index(PromptLogprobs) < kinds.index(TokenEvent)
        (event,) = [one for one in clients[0].events if isinstance(one, PromptLogprobs)]
        check(event.tokens, right)
        assert clients[0].completion.prompt_logprobs == event.tokens
        assert clients[0].cached == 0
        assert not any(isinstance(one, PromptLogprobs) for one in clients[1].events)


def test_no_reply_is_needed(make_service: MakeService, served: LLM):
    params = SamplingParams(max_tokens=0, prompt_logprobs=2)
    client = Client(make_service(), PROMPT, params)
    assert client.token_ids == []
    scores = client.completion.prompt_logprobs
    assert scores is not None
    check(scores, expected(served, PROMPT, "exact"))


def test_what_is_no_count_is_refused():
    with pytest.raises(ConfigError, match="prompt_logprobs: expected"):
        SamplingParams(prompt_logprobs=-1)
