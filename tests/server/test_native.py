"""``/completion``, as clients of llama.cpp call it."""

import json
from typing import Any

import pytest

from tests.server.fake_service import FakeService
from tests.server.live import Live

TEXT = "Hello there, world"


def complete(live: Live, **body: Any) -> Any:
    reply = live.client.post("/completion", json={"prompt": "x", **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_a_reply(live: Live, service: FakeService) -> None:
    reply = complete(live, prompt="the key", return_tokens=True)
    assert reply["content"] == TEXT
    assert reply["tokens"] == [*service.tokenizer.encode(TEXT, add_special=False), 0]
    assert (reply["stop"], reply["stop_type"], reply["stopping_word"]) == (True, "eos", "")
    assert reply["prompt"] == "the key"
    assert reply["tokens_evaluated"] == len(service.last.prompt_ids)
    assert reply["tokens_predicted"] == len(reply["tokens"])
    assert (reply["tokens_cached"], reply["truncated"]) == (0, False)
    assert reply["generation_settings"]["n_predict"] == -1
    assert reply["timings"]["cache_n"] == 0
    assert reply["attention"]["mode"] == "exact"


@pytest.mark.parametrize(
    ("more", "content", "kind", "word"),
    [
        ({"n_predict": 3}, "Hel", "limit", ""),
        ({"stop": [", w", "zzz"]}, "Hello there", "word", ", w"),
        ({"stop": ["world", "ld"]}, "Hello there, ", "word", "world"),
        ({}, TEXT, "eos", ""),
    ],
)
def test_why_it_ended(live: Live, more: Any, content: str, kind: str, word: str) -> None:
    reply = complete(live, **more)
    assert reply["content"] == content
    assert (reply["stop_type"], reply["stopping_word"]) == (kind, word)


def test_a_stream(live: Live) -> None:
    body = {"prompt": "x", "stream": True, "n_probs": 1, "return_progress": True}
    lines = live.client.post("/completion", json=body).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data:")]
    *pieces, last = [chunk for chunk in chunks if "prompt_progress" not in chunk]
    assert "".join(piece["content"] for piece in pieces) == TEXT
    assert not any(piece["stop"] for piece in pieces)
    assert pieces[0]["completion_probabilities"][0]["token"] == "H"
    assert (last["stop"], last["content"], last["stop_type"]) == (True, "", "eos")
    assert last["timings"]["predicted_n"] == last["tokens_predicted"]
    assert chunks[0]["prompt_progress"]["processed"] == 0


def test_prompts_of_text_and_ids(live: Live, service: FakeService) -> None:
    encode = service.tokenizer.encode
    complete(live, prompt=[1, "ab", 5])
    assert list(service.last.prompt_ids) == [1, *encode("ab"), 5]
    replies = complete(live, prompt=["a", [5, 6]])
    assert [reply["index"] for reply in replies] == [0, 1]
    assert list(service.last.prompt_ids) == [5, 6]


def test_probabilities_of_the_whole(live: Live) -> None:
    reply = complete(live, n_probs=2, stop=[" world"])
    listed = reply["completion_probabilities"]
    assert "".join(one["token"] for one in listed) == "Hello there,"
    assert listed[0]["id"] == listed[0]["top_logprobs"][0]["id"]
    assert [one["logprob"] for one in listed[0]["top_logprobs"]] == [-0.5, -1.5]
    assert "completion_probabilities" not in complete(live)


def test_parameters_arrive(live: Live, service: FakeService) -> None:
    complete(
        live,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=11,
        repeat_penalty=1.1,
        repeat_last_n=32,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        ignore_eos=True,
        cache_prompt=False,
        id_slot=2,
        logit_bias=[[5, -1.5], ["the", 2], [7, False]],
        n_predict=9,
    )
    params = service.last.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.5, 3, 0.9, 0.1)
    assert (params.seed, params.repeat_penalty, params.repeat_last_n) == (11, 1.1, 32)
    assert (params.presence_penalty, params.frequency_penalty) == (0.2, 0.3)
    assert params.logit_bias == {5: -1.5, 260: 2.0, 7: float("-inf")}
    assert (params.max_tokens, params.ignore_eos) == (9, True)
    assert (service.last.cache_prompt, service.last.slot) == (False, 2)
    complete(live, seed=-1)
    assert service.last.params.seed is None
    complete(live, seed=-5)
    assert service.last.params.seed == 2**64 - 5


def test_fields_can_be_chosen(live: Live) -> None:
    fields = ["content", "timings/predicted_n", "generation_settings/seed", "nothing", "content/x"]
    assert complete(live, response_fields=fields) == {
        "content": TEXT,
        "predicted_n": 15,
        "seed": -1,
    }


def test_a_schema(live: Live, service: FakeService) -> None:
    complete(live, json_schema={"type": "object"})
    assert service.last.params.constraint is not None
    reply = live.client.post(
        "/completion",
        json={"prompt": "x", "json_schema": {}, "response_format": {"type": "json_object"}},
    )
    # llama.cpp's endpoint has no response_format, so it is one of the fields nobody knows.
    assert reply.status_code == 200
