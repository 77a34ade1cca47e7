"""Requests as known programs send them, on a real model: Open WebUI, evaluation harnesses."""

import json
import threading
from typing import Any

import numpy as np
import openai
import pytest

from kvsieve.server.served import Served
from tests.server.live import Live

TITLE = (
    "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n"
    '### Output:\nJSON format: {{ "title": "your title" }}\n### Chat History:\n{}'
)
TAGS = (
    "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history.\n"
    '### Output:\nJSON format: {{ "tags": ["tag1", "tag2"] }}\n### Chat History:\n{}'
)
FOLLOW_UPS = (
    "### Task:\nSuggest 3-5 relevant follow-up questions based on the chat history.\n"
    '### Output:\nJSON format: {{ "follow_ups": ["Question 1?"] }}\n### Chat History:\n{}'
)


def test_a_turn_in_open_webui_and_what_it_asks_in_the_background(smollm2_live: Live) -> None:
    """It streams an answer, and then asks for a title, tags and follow-ups at once; none of that
    may cost the conversation its place in the cache.
    """
    live = smollm2_live
    headers = {
        "Authorization": "Bearer any",
        "Content-Type": "application/json",
        "X-OpenWebUI-User-Name": "A%20User",
        "X-OpenWebUI-User-Id": "1",
        "X-OpenWebUI-User-Email": "user@example.org",
        "X-OpenWebUI-User-Role": "admin",
        "X-OpenWebUI-Chat-Id": "8c8a",
    }
    listed = live.client.get("/v1/models", headers=headers)
    model = listed.json()["data"][0]["id"]

    def ask(messages: list[dict[str, Any]], **more: Any) -> Any:
        body = {"model": model, "messages": messages, **more}
        return live.client.post("/v1/chat/completions", json=body, headers=headers)

    system = "You are a guide to the harbour town of Quilltide. " * 8
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": "What is there to see?"},
    ]
    more: Any = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 24}
    reply = ask(messages, **more, temperature=0.8, top_p=0.9, stop=["###"], frequency_penalty=0.2)
    assert reply.headers["content-type"].startswith("text/event-stream")
    *chunks, done = [
        line.removeprefix("data: ") for line in reply.text.splitlines() if line.startswith("data:")
    ]
    assert done == "[DONE]"
    events = [json.loads(chunk) for chunk in chunks]
    text = "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"])
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] > 0

    messages.append({"role": "assistant", "content": text})
    history = "\n".join(f"{one['role'].upper()}: {one['content']}" for one in messages[1:])
    answers: list[str] = []

    def background(template: str) -> None:
        question = [{"role": "user", "content": template.format(history)}]
        answer = ask(question, stream=False, max_completion_tokens=16).json()
        answers.append(answer["choices"][0]["message"]["content"])

    threads = [
        threading.Thread(target=background, args=(one,)) for one in (TITLE, TAGS, FOLLOW_UPS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 3

    cached = {"type": "text", "text": "And to eat?", "cache_control": {"type": "ephemeral"}}
    messages.append({"role": "user", "content": [cached]})
    second = ask(messages, stream=False, max_tokens=4, reasoning={"effort": "low"}).json()
    reused = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert reused >= usage["prompt_tokens"]


def test_how_a_harness_scores_continuations(
    smollm2_client: openai.OpenAI, smollm2_live: Live, smollm2: Served
) -> None:
    """Token ids in, log probabilities out; the last entry belongs to the one token it has to ask
    for, and is dropped.
    """
    encode = smollm2.tokenizer.encode
    context = encode("The capital of France is", add_special=False)
    endings = [encode(text, add_special=False) for text in (" Paris", " a very large banana")]
    reply = smollm2_client.completions.create(
        model="m",
        prompt=[context + ending for ending in endings],
        temperature=0,
        max_tokens=1,
        logprobs=1,
        seed=1234,
        echo=True,
    )
    scores, greedy = [], []
    for choice, ending in zip(reply.choices, endings, strict=True):
        logged: Any = choice.logprobs
        scored = logged.token_logprobs[len(context) : -1]
        assert len(scored) == len(ending)
        scores.append(sum(scored))
        best = [max(top.values()) for top in logged.top_logprobs[len(context) : -1]]
        greedy.append(scored == best)
    assert scores[0] > scores[1] + 5
    assert greedy == [True, False]


def test_the_score_of_a_text_is_that_of_generating_it(smollm2_client: openai.OpenAI) -> None:
    """The log probability of a token is the same bits in a prompt and in a reply."""
    asked: Any = {"model": "m", "temperature": 0, "logprobs": 3}
    prompt = "Once upon a time"
    said = smollm2_client.completions.create(prompt=prompt, max_tokens=8, **asked).choices[0]
    generated: Any = said.logprobs
    scored = smollm2_client.completions.create(
        prompt=prompt + said.text, max_tokens=0, echo=True, **asked
    ).choices[0]
    logged: Any = scored.logprobs
    assert scored.text == prompt + said.text
    assert (scored.finish_reason, logged.token_logprobs[0]) == ("length", None)
    assert logged.tokens[-8:] == generated.tokens
    assert logged.token_logprobs[-8:] == generated.token_logprobs
    assert logged.top_logprobs[-8:] == generated.top_logprobs
    begin = len(prompt)
    assert [one - begin for one in logged.text_offset[-8:]] == generated.text_offset
    # Probabilities of the best tokens are the largest of all: nothing listed exceeds them.
    for chosen, top in zip(logged.token_logprobs[1:], logged.top_logprobs[1:], strict=True):
        assert chosen <= max(top.values()) <= 0
        assert np.exp(list(top.values())).sum() <= 1 + 1e-9


@pytest.mark.parametrize("stream", [False, True])
def test_scoring_and_generating_share_a_server(smollm2_client: openai.OpenAI, stream: bool) -> None:
    """A long text is scored in pieces, in the company of others, with the same result."""
    asked: Any = {"model": "m", "temperature": 0, "logprobs": 0, "echo": True, "max_tokens": 0}
    prompt = [2000 + 17 * place % 30_000 for place in range(300)]
    alone: Any = smollm2_client.completions.create(prompt=prompt, **asked).choices[0].logprobs
    assert len(alone.token_logprobs) == 300
    found: list[Any] = []

    def score() -> None:
        reply: Any = smollm2_client.completions.create(prompt=prompt, stream=stream, **asked)
        if not stream:
            found.append(reply.choices[0].logprobs.token_logprobs)
            return
        parts = [chunk.choices[0].logprobs for chunk in reply]
        found.append([x for part in parts if part is not None for x in part.token_logprobs])

    threads = [threading.Thread(target=score) for _ in range(2)]
    for thread in threads:
        thread.start()
    smollm2_client.completions.create(model="m", prompt="Hello", max_tokens=8)
    for thread in threads:
        thread.join()
    assert found == [alone.token_logprobs] * 2
