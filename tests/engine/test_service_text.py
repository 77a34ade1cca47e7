"""Text of replies in a batch (STR-01, STR-03): no half characters, no part of a stop string, the
same joined pieces as a reply at once. A constraint makes the model say given bytes, one a token.
"""

import json
import re

import pytest

from kvsieve.engine.constraint import Constraint
from kvsieve.engine.llm import LLM
from kvsieve.engine.requests import Finished
from kvsieve.engine.sampling import SamplingParams
from tests.engine.serving import Client, MakeService, make_ids

SMILE = "\U0001f600"


def saying(text: str, **params: object) -> SamplingParams:
    settings = {"max_tokens": 60, **params}
    return SamplingParams(constraint=Constraint.regex(re.escape(text)), **settings)  # type: ignore[arg-type]


def pieces(client: Client) -> list[str]:
    client.wait()
    last = client.events[-1]
    assert isinstance(last, Finished)
    found = [*(token.text for token in client.tokens), last.text]
    assert "".join(found) == last.completion.text
    return found


@pytest.mark.parametrize("text", [f"x{SMILE}y", f" {SMILE}", "\u597d\u597d", f"{SMILE}{SMILE}"])
def test_characters_over_several_tokens_come_whole(make_service: MakeService, text: str):
    service = make_service()
    clients = [Client(service, make_ids(20, seed=i), saying(text)) for i in range(3)]
    for client in clients:
        found = pieces(client)
        assert "".join(found) == text
        assert not any("\ufffd" in piece for piece in found)
        assert client.completion.finish_reason == "stop"


@pytest.mark.parametrize(
    ("count", "text"), [(1, "x"), (2, "x\ufffd"), (3, "x\ufffd"), (5, "x" + SMILE)]
)
def test_a_reply_cut_within_a_character(
    make_service: MakeService, served: LLM, count: int, text: str
):
    params = saying(f"x{SMILE}y", max_tokens=count)
    client = Client(make_service(), make_ids(20), params)
    found = pieces(client)
    assert "".join(found) == text
    assert client.completion.finish_reason == "length"
    assert json.loads(json.dumps(text)) == served.generate(make_ids(20), params).text
    # What was held back comes with the end, not as a token's text.
    assert all("\ufffd" not in piece for piece in found[:-1])


@pytest.mark.parametrize(
    ("said", "stops", "text"),
    [
        ("abcDEFGHIJK", "DEFGHIJ", "abc"),
        ("The quick brown fox", ("own fox",), "The quick br"),
        ("abcdef", ("cdef", "cd"), "ab"),
        (f"a{SMILE}b", SMILE, "a"),
        ("abc", None, "abc"),
        ("abcab", ("abd",), "abcab"),
    ],
)
def test_no_part_of_a_stop_string_leaks(
    make_service: MakeService, said: str, stops: object, text: str
):
    client = Client(make_service(), make_ids(20), saying(said, stop=stops))
    assert "".join(pieces(client)) == text
    done = client.completion
    assert done.finish_reason == "stop"
    assert (done.stop_string is None) == (text == said)
    if done.stop_string is not None:
        assert said.startswith(text + done.stop_string)


def test_log_probabilities_name_the_tokens_whose_bytes_make_the_text(
    make_service: MakeService, served: LLM
):
    client = Client(make_service(), make_ids(20), saying(f"x{SMILE}", logprobs=3))
    client.wait()
    spoken = b"".join(served.tokenizer.token_bytes(token.token_id) for token in client.tokens)
    assert spoken == f"x{SMILE}".encode()
    for token in client.tokens:
        assert token.logprobs is not None
        assert len(token.logprobs.top) == 3
        ranked = [one.logprob for one in token.logprobs.top]
        assert ranked == sorted(ranked, reverse=True)
        assert token.logprobs.logprob <= ranked[0] <= 0
