"""What OpenAI's client relies on: conversations and their streams."""

import time
from typing import Any

import openai
import pytest

from kvsieve.engine.tokenizer import Tokenizer
from tests.server.fake_service import FakeService
from tests.server.live import PATIENCE_S, TEXT, Live

HI: Any = [{"role": "user", "content": "Hi"}]


# -- chat ------------------------------------------------------------------------------------


def test_a_chat_completion(client: openai.OpenAI, service: FakeService) -> None:
    reply = client.chat.completions.create(model="m", messages=HI)
    assert reply.id.startswith("chatcmpl-")
    assert reply.object == "chat.completion"
    assert abs(reply.created - time.time()) < PATIENCE_S
    assert reply.system_fingerprint == "f" * 16
    (choice,) = reply.choices
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.content) == ("assistant", TEXT)
    assert choice.message.refusal is None
    assert choice.message.tool_calls is None
    said = service.tokenizer.decode(service.last.prompt_ids, special=True)
    assert said == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(service.last.prompt_ids)
    assert reply.usage.completion_tokens == service.tickets[0].said
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


def test_every_reply_says_which_attention_ran_and_how_long_it_took(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="m", messages=HI, extra_body={"sparse": {"k": 8, "selector": "even"}}
    )
    extra: Any = reply.model_extra
    assert extra["attention"]["mode"] == "sparse"
    assert (extra["attention"]["k"], extra["attention"]["selector"]) == (8, "even")
    assert extra["attention"]["density"] == {"prefill": 0.75, "decode": 0.25}
    timings = extra["timings"]
    assert timings["cache_n"] == 0
    assert timings["prompt_n"] == reply.usage.prompt_tokens  # type: ignore[union-attr]
    assert timings["prompt_per_token_ms"] == pytest.approx(10.0 / timings["prompt_n"], abs=1e-3)
    assert timings["predicted_per_second"] == pytest.approx(timings["predicted_n"] / 0.02)


def test_a_stream_of_a_chat(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="m", messages=HI, stream=True))
    assert len({(c.id, c.created, c.model, c.object) for c in chunks}) == 1
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(len(c.choices) == 1 and c.choices[0].index == 0 for c in chunks)
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == TEXT
    assert all(c.usage is None for c in chunks)
    last: Any = chunks[-1].model_extra
    assert last["attention"]["mode"] == "exact"
    assert last["timings"]["predicted_n"] > 0


def test_usage_comes_only_when_asked_for_and_last(client: openai.OpenAI) -> None:
    *chunks, last = client.chat.completions.create(
        model="m", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    assert last.choices == []
    assert last.usage is not None
    whole = client.chat.completions.create(model="m", messages=HI)
    assert last.usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks)
    off = client.chat.completions.create(
        model="m", messages=HI, stream=True, stream_options={"include_usage": False}
    )
    assert all(chunk.choices for chunk in off)


def test_the_bytes_of_a_stream(live: Live, service: FakeService) -> None:
    """Headers before the prompt is read, comments in the silence, no `id:` and no empty `data:`."""
    service.go.clear()
    body = {"messages": HI, "stream": True, "return_progress": True}
    with live.client.stream("POST", "/chat/completions", json=body) as reply:
        assert reply.status_code == 200
        assert reply.headers["content-type"].split(";")[0] == "text/event-stream"
        lines = reply.iter_lines()
        seen = []
        for line in lines:
            seen.append(line)
            if line.startswith(":"):
                service.go.set()
            if line == "data: [DONE]":
                break
        seen += list(lines)
    assert ": keep-alive" in seen
    assert seen[-2:] == ["data: [DONE]", ""]
    for line, after in zip(seen[::2], seen[1::2], strict=True):
        assert line.startswith(("data: {", ": ", "data: [DONE]"))
        assert after == ""


def test_progress_of_a_long_prompt(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="m", messages=HI, stream=True, extra_body={"return_progress": True}
        )
    )
    extras: list[Any] = [chunk.model_extra for chunk in chunks]
    progress = [extra["prompt_progress"] for extra in extras if "prompt_progress" in extra]
    assert [one["processed"] for one in progress] == [0, 17]
    assert all(one["total"] == 17 and one["cache"] == 0 for one in progress)
    assert all(isinstance(one["time_ms"], int) for one in progress)


def test_both_names_of_the_limit_and_the_newer_one_wins(
    client: openai.OpenAI, service: FakeService
) -> None:
    reply = client.chat.completions.create(model="m", messages=HI, max_tokens=3)
    assert reply.choices[0].message.content == TEXT[:3]
    assert reply.choices[0].finish_reason == "length"
    reply = client.chat.completions.create(
        model="m", messages=HI, max_tokens=3, max_completion_tokens=2
    )
    assert reply.choices[0].message.content == TEXT[:2]
    client.chat.completions.create(model="m", messages=HI)
    assert service.last.params.max_tokens == 2**31 - 1


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices(client: openai.OpenAI, service: FakeService, stream: bool) -> None:
    asked: Any = {"model": "m", "messages": HI, "n": 3, "seed": 7, "stream": stream}
    reply: Any = client.chat.completions.create(**asked)
    texts = ["", "", ""]
    if stream:
        for chunk in reply:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        texts = [choice.message.content for choice in reply.choices]
        assert [choice.index for choice in reply.choices] == [0, 1, 2]
        assert reply.usage.prompt_tokens == 17
        assert reply.usage.completion_tokens == 3 * service.tickets[0].said
        assert all("attention" in choice.model_extra for choice in reply.choices)
    assert texts == [TEXT] * 3
    # Each has a seed of its own, and the first one that of the request.
    assert [ticket.request.params.seed for ticket in service.tickets] == [7, 8, 9]


def test_stop_strings(client: openai.OpenAI) -> None:
    for stop in (" world", [" world"], ["never", ", w", "ld"]):
        reply = client.chat.completions.create(model="m", messages=HI, stop=stop)
        assert reply.choices[0].message.content in ("Hello there,", "Hello there")
        assert reply.choices[0].finish_reason == "stop"
        chunks = client.chat.completions.create(model="m", messages=HI, stop=stop, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == reply.choices[0].message.content
    reply = client.chat.completions.create(model="m", messages=HI, stop=["a", "b", "c", "d", "!"])
    assert reply.choices[0].message.content == "Hello there, worl"
    with pytest.raises(openai.BadRequestError, match="stop: expected strings of 1 to"):
        client.chat.completions.create(model="m", messages=HI, stop=[""])


def test_logprobs(client: openai.OpenAI, service: FakeService) -> None:
    reply = client.chat.completions.create(
        model="m", messages=HI, logprobs=True, top_logprobs=2, stop=" world"
    )
    logged: Any = reply.choices[0].logprobs
    # The text of the stop string is not in the reply, and neither are its tokens.
    assert "".join(entry.token for entry in logged.content) == "Hello there,"
    for entry in logged.content:
        assert bytes(entry.bytes).decode() == entry.token
        assert entry.logprob == -0.5
        assert [one.logprob for one in entry.top_logprobs] == [-0.5, -1.5]
        assert entry.top_logprobs[0].token == entry.token
    assert service.last.params.logprobs == 2
    reply = client.chat.completions.create(model="m", messages=HI, logprobs=True)
    assert reply.choices[0].logprobs.content[0].top_logprobs == []  # type: ignore[union-attr,index]


def test_streamed_logprobs_are_those_of_the_whole(client: openai.OpenAI) -> None:
    asked: Any = {"model": "m", "messages": HI, "logprobs": True, "stop": ", wx"}
    whole = client.chat.completions.create(**asked)
    streamed = []
    text = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        if choice.logprobs is not None:
            streamed += choice.logprobs.content or []
            assert text.startswith("".join(entry.token for entry in streamed)) or text == ""
    assert streamed == whole.choices[0].logprobs.content  # type: ignore[union-attr]
    assert "".join(entry.token for entry in streamed) == TEXT


def test_half_characters(client: openai.OpenAI, service: FakeService, tokenizer: Tokenizer) -> None:
    """Case STR-03: an emoji in four tokens, a lone byte, an end in the middle of a character."""
    by_bytes = {tokenizer.token_bytes(i): i for i in range(3, 259)}
    emoji = [by_bytes[bytes([byte])] for byte in "😀".encode()]
    lone = by_bytes[b"\xff"]
    for script, limit, text in (
        ([*emoji, *emoji], None, "😀😀"),
        ([*emoji, lone, *emoji], None, "😀�😀"),
        (emoji, 2, "�"),
        ([*emoji, *emoji], 6, "😀�"),
    ):
        service.script = lambda _, script=script: script  # type: ignore[misc]
        asked: Any = {"model": "m", "messages": HI, "logprobs": True, "max_tokens": limit}
        whole = client.chat.completions.create(**asked)
        assert whole.choices[0].message.content == text
        pieces, raw = [], []
        for chunk in client.chat.completions.create(**asked, stream=True):
            choice = chunk.choices[0]
            pieces.append(choice.delta.content or "")
            if choice.logprobs is not None and choice.logprobs.content:
                raw += [byte for entry in choice.logprobs.content for byte in entry.bytes or []]
        assert "".join(pieces) == text
        assert "�" not in pieces or "�" in text
        expected = script if limit is None else script[:limit]
        assert bytes(raw) == b"".join(tokenizer.token_bytes(i) for i in expected)
    service.script = lambda _: [*emoji, *emoji, *emoji]
    reply = client.chat.completions.create(model="m", messages=HI, stop="😀")
    assert reply.choices[0].message.content == ""


def test_logit_bias_keys_are_strings(client: openai.OpenAI, service: FakeService) -> None:
    client.chat.completions.create(model="m", messages=HI, logit_bias={"7": -100, "8": 2.5})  # type: ignore[dict-item]
    assert service.last.params.logit_bias == {7: -100.0, 8: 2.5}
    for bad in ({"288": 1}, {"x": 1}, {"-1": 1}, {"1e3": 1}):
        with pytest.raises(openai.BadRequestError, match="logit_bias: expected token ids"):
            client.chat.completions.create(model="m", messages=HI, logit_bias=bad)


def test_messages_of_every_kind(client: openai.OpenAI, service: FakeService) -> None:
    messages: Any = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
        {"role": "user", "content": ""},
    ]
    client.chat.completions.create(model="m", messages=messages)
    said = service.tokenizer.decode(service.last.prompt_ids, special=True)
    assert said == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n42<|im_end|>\n"
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n"
    )


def test_pictures_are_refused_and_not_fetched(client: openai.OpenAI) -> None:
    picture: Any = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
    with pytest.raises(openai.BadRequestError, match="the only kind, got image_url"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": [picture]}])


def test_fields_that_change_nothing_are_ignored(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(
        model="m",
        messages=HI,
        user="me",
        store=True,
        metadata={"a": "b"},
        service_tier="auto",
        prompt_cache_key="k",
        safety_identifier="s",
        reasoning_effort="low",
        extra_body={"nobody_knows": [1, {"x": None}]},
    )
    assert reply.choices[0].message.content == TEXT
