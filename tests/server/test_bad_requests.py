"""What a client may send: whatever is wrong is a 4xx with OpenAI's error object."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvsieve.server.config import RequestLimits, ServerConfig
from kvsieve.server.served import Served
from tests.server.fake_service import FakeService
from tests.server.live import (
    CHAT,
    COMPLETION,
    NATIVE,
    TEXT,
    USER,
    Live,
    assert_still_serving,
    error_of,
    post,
    serving,
)

LIMITS = RequestLimits(
    body_bytes=100_000, read_s=1.0, messages=4, prompts=3, choices=4, stops=5, tools=2
)


@pytest.fixture(scope="module")
def running(served: Served) -> Iterator[Live]:
    with serving(served, ServerConfig(port=0, limits=LIMITS)) as live:
        yield live


BAD_BODIES = {
    "empty": b"",
    "no JSON": b"prompt=x",
    "cut": b'{"prompt": "x"',
    "not UTF-8": b'{"prompt": "\xff"}',
    "UTF-16": '{"prompt": "x"}'.encode("utf-16"),
    "encoded surrogate": b'{"prompt": "\xed\xa0\x80"}',
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "NUL": b'{"prompt": "\x00"}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "Infinity": b'{"prompt": "x", "temperature": Infinity}',
    "beyond doubles": b'{"prompt": "x", "temperature": 1e400}',
    "deep": b'{"prompt": "x", "a": ' + b"[" * 70 + b"]" * 70 + b"}",
    "very deep": b"[" * 40_000 + b"]" * 40_000,
    "deep objects": b'{"a":' * 9_000 + b"1" + b"}" * 9_000,
    "huge integer": b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
    "a list": b"[]",
    "a number": b"7",
    "null": b"null",
}


@pytest.mark.parametrize("name", BAD_BODIES)
@pytest.mark.parametrize("path", [CHAT, COMPLETION, NATIVE, "/tokenize"])
def test_bodies_that_are_no_json_of_ours(live: Live, path: str, name: str) -> None:
    assert error_of(post(live, path, BAD_BODIES[name]))["type"] == "invalid_request_error"
    assert_still_serving(live)


NAN = float("nan")
OUT_OF_RANGE: dict[str, list[Any]] = {
    "temperature": [-1, -1e-9, "1", True, [], {}],
    "top_p": [1.5, -0.1, "0.5"],
    "min_p": [2, -1],
    "top_k": [-2, 1.5, "40"],
    "n": [0, -1, 5, 10**9, 1.0, "2"],
    "seed": [2**64, -(2**63) - 1, 1.5, "1"],
    "stop": [[""], [1], 7, ["x"] * 6, "x" * 1001, [None]],
    "logit_bias": [{"999": 1}, {"a": 1}, {"1": "x"}, [1], [[1]], [[1, 2, 3]], [[True, 1]], 5],
    "stream": ["yes", 1],
    "stream_options": [True, {"include_usage": 1}],
    "presence_penalty": ["a"],
    "sparse": [{"k": 0}, {"k": "8"}, {"k": 2**40}, {"selector": "best"}, {"unknown": 1}, True],
    "id_slot": [4, -2, 10**9],
    "n_discard": [-1],
    "n_keep": [-2],
    "sse_ping_interval": [0, -5],
    "grammar": ["root ::= x"],
    "mirostat": [2],
    "typical_p": [0.5],
    "samplers": [["top_k"]],
    "t_max_predict_ms": [100],
}


@pytest.mark.parametrize("field", OUT_OF_RANGE)
def test_values_out_of_range(live: Live, field: str) -> None:
    for value in OUT_OF_RANGE[field]:
        for path, body in ((CHAT, {"messages": [USER]}), (COMPLETION, {"prompt": "x"})):
            error = error_of(post(live, path, {**body, field: value}))
            assert error["param"] == field, (value, error)
    assert_still_serving(live)


@pytest.mark.parametrize("value", [-1, "5", 2.5, True, -(10**18)])
def test_limits_that_are_none(live: Live, value: Any) -> None:
    """Case SRV-01; llama.cpp's own name takes -1 for "no limit"."""
    for path, body, name in (
        (CHAT, {"messages": [USER]}, "max_tokens"),
        (CHAT, {"messages": [USER]}, "max_completion_tokens"),
        (COMPLETION, {"prompt": "x"}, "max_tokens"),
        (NATIVE, {"prompt": "x"}, "max_tokens"),
    ):
        assert error_of(post(live, path, {**body, name: value}))["param"] == name
    assert_still_serving(live)
    assert post(live, NATIVE, {"prompt": "x", "n_predict": -1}).json()["content"] == TEXT


def test_no_tokens_and_a_great_many(live: Live, service: FakeService) -> None:
    reply = post(live, COMPLETION, {"prompt": "x", "max_tokens": 0, "echo": True}).json()
    assert reply["choices"][0]["text"] == "x"
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    reply = post(live, CHAT, {"messages": [USER], "max_tokens": 10**18}).json()
    assert reply["choices"][0]["message"]["content"] == TEXT
    assert service.last.params.max_tokens == 2**31 - 1


@pytest.mark.parametrize(
    "prompt", [[], [[]], [""] * 4, [5, "x"], [-1], [288], [10**30], [True], [[5], []], {"a": 1}, 7]
)
def test_prompts_that_are_none(live: Live, prompt: Any) -> None:
    assert error_of(post(live, COMPLETION, {"prompt": prompt}))["param"] == "prompt"
    assert_still_serving(live)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        None,
        "x",
        {},
        [{}],
        [{"content": "x"}],
        [{"role": "robot", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "video", "text": "x"}]}],
        [{"role": "user", "content": ["x"]}],
        [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}],
        [USER] * 5,
        ["x"],
    ],
)
def test_messages_that_are_none(live: Live, messages: Any) -> None:
    """Case SRV-01."""
    for path in (CHAT, "/apply-template", "/v1/chat/completions/input_tokens"):
        error = error_of(post(live, path, {"messages": messages}))
        assert error["param"].startswith("messages")
    error_of(post(live, CHAT, {}))
    assert_still_serving(live)


def test_tools_that_are_none(live: Live) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    other = {"type": "function", "function": {"name": "g"}}
    named = {"type": "function", "function": {"name": "h"}}
    for more in (
        {"tools": [{"type": "code"}]},
        {"tools": [{"type": "function", "function": {"name": "a b"}}]},
        {"tools": [{"type": "function", "function": {"name": ""}}]},
        {"tools": [tool, tool]},
        {"tools": [tool, other, named]},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
        {"tools": [tool], "tool_choice": named},
        {"tools": [tool], "tool_choice": "sometimes"},
        {"tool_choice": "required"},
    ):
        error = error_of(post(live, CHAT, {"messages": [USER], **more}))
        assert error["param"] in ("tools", "tool_choice")
    assert_still_serving(live)


OPTIONAL: dict[str, list[str]] = {
    CHAT: ["max_completion_tokens", "tools", "tool_choice", "top_logprobs", "response_format"],
    COMPLETION: ["echo", "suffix", "best_of", "logprobs"],
    NATIVE: ["n_predict", "n_probs", "post_sampling_probs", "response_fields", "id_slot"],
}
COMMON = [
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "seed", "n", "stream"),
    *("stream_options", "logit_bias", "logprobs", "user", "presence_penalty", "repeat_penalty"),
    *("frequency_penalty", "sparse", "cache_prompt", "model", "ignore_eos", "json_schema"),
]


@pytest.mark.parametrize("path", OPTIONAL)
def test_null_is_the_same_as_nothing(live: Live, service: FakeService, path: str) -> None:
    """Case SRV-04, one field at a time and all at once."""
    body: Any = {"messages": [USER]} if path == CHAT else {"prompt": "x"}
    assert post(live, path, body).status_code == 200
    expected = service.last
    fields = [*COMMON, *OPTIONAL[path]]
    for more in (*({name: None} for name in fields), dict.fromkeys(fields)):
        assert post(live, path, {**body, **more}).status_code == 200
        assert service.last == expected


def test_a_body_that_is_too_large(live: Live) -> None:
    body = json.dumps({"prompt": "x" * 100_000}).encode()
    error_of(post(live, COMPLETION, body), 413)

    def in_pieces() -> Iterator[bytes]:
        # Chunked: there is no length to look at before the bytes come.
        for start in range(0, len(body), 1000):
            yield body[start : start + 1000]

    reply = live.client.post(COMPLETION, content=in_pieces())
    error_of(reply, 413)
    assert_still_serving(live)


def raw(live: Live, data: bytes) -> bytes:
    """What the server says to these bytes until it closes."""
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.sendall(data)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
        return b"".join(parts)


def test_a_body_that_does_not_come(live: Live) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\nConnection: close\r\n"
    )
    reply = raw(live, head + b'\r\n{"prompt":')
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert_still_serving(live)


def test_heads_that_are_none(live: Live) -> None:
    for data in (
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
        b"NOT HTTP\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X-Long: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    ):
        assert raw(live, data).startswith(b"HTTP/1.1 4")
        assert_still_serving(live)


def test_expect_continue_and_one_connection_for_many_requests(live: Live) -> None:
    body = b'{"prompt": "x"}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(body)
    with socket.create_connection(("127.0.0.1", live.port)) as connection:
        connection.sendall(head + b"Expect: 100-continue\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 100 ")
        connection.sendall(body)
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    with httpx.Client(base_url=live.url) as client:
        for _ in range(3):
            error_of(client.post(COMPLETION, content=b"no"))
            assert client.post(COMPLETION, json={"prompt": "x"}).status_code == 200


def test_paths(live: Live) -> None:
    """With and without /v1, HEAD and OPTIONS, a slash at the end, and what is not there."""
    for path in ("/models", "/health", "/props", "/slots", "/metrics"):
        for prefix in ("", "/v1"):
            for end in ("", "/"):
                assert live.client.get(prefix + path + end).status_code == 200
        assert live.client.head(path).status_code == 200
        options = live.client.options(path)
        assert (options.status_code, "GET" in options.headers["allow"]) == (204, True)
    for path in ("/chat/completions", "/v1/chat/completions/"):
        assert post(live, path, {"messages": [USER]}).status_code == 200
    error_of(live.client.get("/v1/nothing"), 404)
    error_of(live.client.get("/v1/chat/completions"), 405)
    error_of(live.client.get("/v1/models/%00%ff/../x"), 404)
    error_of(live.client.get("/v1/" + "x" * 5000), 404)


def test_any_content_type_will_do(live: Live) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        reply = live.client.post(
            COMPLETION, content=b'{"prompt": "x"}', headers={"Content-Type": kind}
        )
        assert reply.status_code == 200
