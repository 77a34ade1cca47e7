"""What OpenAI's client relies on: completions, constraints, and what is refused."""

import base64
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.server.fake_service import FakeService
from tests.server.live import TEXT

HI: Any = [{"role": "user", "content": "Hi"}]


# -- completions -------------------------------------------------------------------------------


def test_a_completion(client: openai.OpenAI, service: FakeService) -> None:
    reply = client.completions.create(model="m", prompt="the key")
    assert reply.id.startswith("cmpl-")
    assert reply.object == "text_completion"
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (TEXT, "stop")
    assert list(service.last.prompt_ids) == service.tokenizer.encode("the key")
    assert service.last.params.max_tokens == 16
    chunks = list(client.completions.create(model="m", prompt="the key", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].model_extra["attention"]["mode"] == "exact"  # type: ignore[index]


def test_prompts_of_every_kind(client: openai.OpenAI, service: FakeService) -> None:
    encode = service.tokenizer.encode
    for prompt, ids in (
        ("ab", [encode("ab")]),
        (["ab", "c"], [encode("ab"), encode("c")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ("", [[1]]),
        ("<|im_end|>", [[2]]),
    ):
        service.tickets.clear()
        client.completions.create(model="m", prompt=prompt)
        assert [list(ticket.request.prompt_ids) for ticket in service.tickets] == ids


def test_choices_are_prompt_major(client: openai.OpenAI, service: FakeService) -> None:
    spoken = service.tokenizer.encode
    service.script = lambda request: [*spoken("<"), *request.prompt_ids, *spoken(">")]
    reply = client.completions.create(model="m", prompt=["a", "b"], n=2, echo=True)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in reply.choices] == ["a<a>", "a<a>", "b<b>", "b<b>"]
    texts = [""] * 4
    for chunk in client.completions.create(
        model="m", prompt=["a", "b"], n=2, echo=True, stream=True
    ):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["a<a>", "a<a>", "b<b>", "b<b>"]


def test_legacy_logprobs(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="m", prompt="x", logprobs=2)
    logged: Any = reply.choices[0].logprobs
    assert "".join(logged.tokens) == TEXT
    for token, offset in zip(logged.tokens, logged.text_offset, strict=True):
        assert TEXT[offset:].startswith(token)
    assert logged.text_offset[:3] == [0, 1, 2]
    assert logged.token_logprobs == [-0.5] * len(logged.tokens)
    assert logged.top_logprobs[0] == {"H": -0.5, "I": -1.5}


def test_what_completions_do_not_do_is_refused(client: openai.OpenAI) -> None:
    for more in ({"suffix": "x"}, {"best_of": 2}, {"logprobs": 21}, {"echo": True, "logprobs": -1}):
        with pytest.raises(openai.BadRequestError, match=r"expected (none|0 to 20)"):
            client.completions.create(model="m", prompt="x", **more)  # type: ignore[call-overload]
    client.completions.create(model="m", prompt="x", suffix="", best_of=1)


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_with_logprobs_scores_the_prompt(
    client: openai.OpenAI, max_tokens: int, stream: bool
) -> None:
    """How harnesses ask how probable a text is; case SRV-01, max_tokens 0 with echo."""
    asked: Any = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": max_tokens}
    if stream:
        streamed = client.completions.create(model="m", **asked, stream=True)
        chunks = [chunk.choices[0] for chunk in streamed]
        text, reason = "".join(one.text for one in chunks), chunks[-1].finish_reason
        parts = [one.logprobs for one in chunks if one.logprobs is not None]
        fields = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        logged = {name: [x for one in parts for x in getattr(one, name)] for name in fields}
    else:
        (choice,) = client.completions.create(model="m", **asked).choices
        text, reason = choice.text, choice.finish_reason
        logged = choice.logprobs.model_dump()  # type: ignore[union-attr]
    said = TEXT[:max_tokens]
    assert (text, reason) == ("abc" + said, "length")
    assert logged["tokens"] == list("abc" + said)
    assert logged["token_logprobs"] == [None, -1.0, -2.0, *[-0.5] * max_tokens]
    assert logged["top_logprobs"][:3] == [None, {"b": -1.0}, {"c": -2.0}]
    assert logged["text_offset"] == list(range(3 + max_tokens))


def test_what_is_scored_has_an_entry_per_token(client: openai.OpenAI, service: FakeService) -> None:
    """An end token too, or a harness that drops the last entry would drop one of the text."""
    service.script = lambda _: []
    asked: Any = {"model": "m", "echo": True, "logprobs": 0, "max_tokens": 1}
    (choice,) = client.completions.create(prompt=[5, 6], **asked).choices
    assert len(choice.logprobs.tokens) == 3  # type: ignore[union-attr,arg-type]
    service.tickets.clear()
    reply = client.completions.create(prompt=["ab", "é😀"], **asked)
    for choice, ticket in zip(reply.choices, service.tickets, strict=True):
        logged: Any = choice.logprobs
        assert len(logged.tokens) == len(ticket.request.prompt_ids) + 1
        assert logged.tokens[-1] == "<|endoftext|>"
        assert logged.text_offset[-1] == len(choice.text)
        assert choice.finish_reason == "stop"
    # Bytes of one character begin where it does.
    assert reply.choices[1].logprobs.text_offset[:6] == [0, 0, 1, 1, 1, 1]  # type: ignore[union-attr]


# -- constraints and tools -----------------------------------------------------------------------


def test_json_formats_become_constraints(client: openai.OpenAI, service: FakeService) -> None:
    schema: Any = {"type": "object", "properties": {"a": {"type": "integer"}}}
    client.chat.completions.create(model="m", messages=HI, response_format={"type": "json_object"})
    assert service.last.params.constraint is not None
    client.chat.completions.create(
        model="m",
        messages=HI,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}},
    )
    assert '"integer"' in service.last.params.constraint.source  # type: ignore[union-attr]
    client.chat.completions.create(model="m", messages=HI, response_format={"type": "text"})
    assert service.last.params.constraint is None


def test_a_reply_is_parsed(client: openai.OpenAI, service: FakeService) -> None:
    class Person(BaseModel):
        name: str
        age: int

    text = '{"name": "Ada", "age": 36}'
    service.script = lambda _: service.tokenizer.encode(text, add_special=False)
    reply = client.chat.completions.parse(model="m", messages=HI, response_format=Person)
    assert reply.choices[0].message.parsed == Person(name="Ada", age=36)
    assert service.last.params.constraint is not None


def test_a_schema_that_cannot_be_kept_is_refused(client: openai.OpenAI) -> None:
    for schema in ({"type": "colour"}, {"type": "object", "unevaluatedProperties": False}):
        form: Any = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match="json_schema: expected"):
            client.chat.completions.create(model="m", messages=HI, response_format=form)


def test_base64_is_no_text(client: openai.OpenAI) -> None:
    part: Any = {"type": "input_audio", "input_audio": {"data": base64.b64encode(b"x").decode()}}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": [part]}])


def test_a_template_without_tools_refuses_them(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    with pytest.raises(openai.BadRequestError, match="no place for them"):
        client.chat.completions.create(model="m", messages=HI, tools=[tool])
    reply = client.chat.completions.create(model="m", messages=HI, tools=[tool], tool_choice="none")
    assert reply.choices[0].message.content == TEXT
