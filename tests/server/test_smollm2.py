"""The whole server on a real model, driven by the real client."""

import json
import threading
from typing import Any

import openai
import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.engine.llm import LLM
from kvsieve.engine.sampling import SamplingParams
from kvsieve.server.config import ServerConfig, SparsePolicy
from kvsieve.server.served import Served, served_model
from tests.server.live import Live, begin, serving, wait_until

COLOURS: Any = [{"role": "user", "content": "Name three colours."}]
GREEDY: Any = {"model": "m", "temperature": 0, "max_tokens": 12}


@pytest.fixture
def served(smollm2: Served) -> Served:
    return smollm2


@pytest.fixture
def live(smollm2_live: Live) -> Live:
    return smollm2_live


@pytest.fixture
def client(smollm2_client: openai.OpenAI) -> openai.OpenAI:
    return smollm2_client


def ids(count: int, *, seed: int = 0) -> list[int]:
    """Token ids that no other test uses, so that nothing of them is cached."""
    return [1000 + (seed * 7919 + 31 * place) % 40_000 for place in range(count)]


def greedy(client: openai.OpenAI, prompt: list[int] | str, **more: Any) -> Any:
    return client.completions.create(prompt=prompt, **{**GREEDY, **more})


def is_idle(live: Live) -> bool:
    slots = live.client.get("/slots").json()
    return not any(slot["is_processing"] for slot in slots)


def test_the_reply_is_the_engines(client: openai.OpenAI, served: Served) -> None:
    with LLM("smollm2", ctx_size=512) as llm:
        expected = llm.generate(llm.chat_prompt(COLOURS), SamplingParams(max_tokens=12))
    reply = client.chat.completions.create(messages=COLOURS, **GREEDY)
    assert reply.choices[0].message.content == expected.text
    assert reply.usage.prompt_tokens == expected.prompt_tokens  # type: ignore[union-attr]


def test_a_stream_joins_to_the_whole(client: openai.OpenAI) -> None:
    for more in ({}, {"stop": [" is", "colour"]}, {"logprobs": True, "top_logprobs": 3}):
        asked = {"messages": COLOURS, **GREEDY, **more}
        whole = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
        logged = [chunk.choices[0].logprobs for chunk in chunks]
        entries = [entry for one in logged if one is not None for entry in one.content or []]
        listed = whole.choices[0].logprobs
        assert entries == (listed.content if listed is not None else [])


@pytest.mark.parametrize("length", [1, 32, 33, 64])
def test_the_same_prompt_again(client: openai.OpenAI, length: int) -> None:
    """Case PFX-01: the whole prompt is in the cache; then a prefix of it; then another request."""
    prompt = ids(length, seed=length)
    cold = greedy(client, prompt)
    for stream in (False, True):
        warm: Any = (
            greedy(client, prompt, stream=stream, stream_options={"include_usage": True})
            if stream
            else greedy(client, prompt)
        )
        if stream:
            chunks = list(warm)
            text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
            usage = chunks[-1].usage
        else:
            text, usage = warm.choices[0].text, warm.usage
        assert text == cold.choices[0].text
        assert usage.prompt_tokens == length
        # At least one token is computed again: its logits are where the reply begins.
        assert usage.prompt_tokens_details.cached_tokens <= length - 1
        if length > 32:
            assert usage.prompt_tokens_details.cached_tokens >= 32
    prefix = prompt[: max(1, length // 2)]
    fresh = greedy(client, prefix, extra_body={"cache_prompt": False})
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0
    assert greedy(client, prefix).choices[0].text == fresh.choices[0].text
    assert greedy(client, "Once").choices[0].text


def test_the_cached_count_grows(client: openai.OpenAI) -> None:
    prompt = ids(200, seed=500)
    first, second = greedy(client, prompt), greedy(client, prompt)
    counts = [one.usage.prompt_tokens_details.cached_tokens for one in (first, second)]
    assert counts[0] == 0
    assert counts[1] >= 160
    assert second.model_extra["timings"]["cache_n"] == counts[1]
    assert second.model_extra["timings"]["prompt_n"] == 200 - counts[1]


@pytest.mark.parametrize(
    "sparse",
    [
        {"enabled": False},
        {"mass": 0.5},
        # The engine's own tests cover these bit by bit.
        pytest.param({"k": 3, "selector": "probe"}, marks=pytest.mark.slow),
        pytest.param({"k": 3, "selector": "even", "share": "group"}, marks=pytest.mark.slow),
        pytest.param({"k": 3, "selector": "anchors"}, marks=pytest.mark.slow),
        pytest.param({"k": 3, "selector": "window"}, marks=pytest.mark.slow),
    ],
)
def test_seeds_and_company_change_nothing(client: openai.OpenAI, sparse: Any) -> None:
    """Case BAT-01: alone and beside three others, with a cold and a warm cache."""
    asked: Any = {"temperature": 1.0, "seed": 42, "extra_body": {"sparse": sparse}}
    prompt = ids(180, seed=700)
    alone = greedy(client, prompt, **asked)
    cold = {**asked, "extra_body": {"sparse": sparse, "cache_prompt": False}}
    texts: list[str] = []

    def ask(number: int) -> None:
        mine = number % 2 == 0
        reply = greedy(client, prompt if mine else ids(100, seed=number), **cold)
        if mine:
            texts.append(reply.choices[0].text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == [alone.choices[0].text] * 2
    assert greedy(client, prompt, **asked).choices[0].text == alone.choices[0].text
    assert greedy(client, prompt, **{**asked, "seed": 43}).choices[0].text != alone.choices[0].text


def test_sparse_attention_by_request(client: openai.OpenAI) -> None:
    reply = greedy(client, ids(400, seed=900), extra_body={"sparse": {"k": 4, "selector": "even"}})
    attention = reply.model_extra["attention"]
    assert (attention["mode"], attention["selector"], attention["k"]) == ("sparse", "even", 4)
    assert 0 < attention["density"]["decode"] < 0.7
    assert attention["kept_mass"] is None  # `even` estimates nothing
    short = greedy(client, "Hi", extra_body={"sparse": {"k": 4}}).model_extra["attention"]
    assert short["mode"] == "exact"
    assert "fit" in short["exact_because"]


@pytest.mark.parametrize("stream", [False, True])
def test_kept_mass_is_in_every_reply_that_has_it(
    live: Live, client: openai.OpenAI, stream: bool
) -> None:
    sparse = {"mass": 0.9, "share": "group"}
    asked: Any = {"max_tokens": 6, "extra_body": {"sparse": sparse}, "stream": stream}
    reply: Any = greedy(client, ids(900, seed=910), **asked)
    if stream:
        *_, reply = reply
    attention = reply.model_extra["attention"]
    assert (attention["mode"], attention["selector"]) == ("sparse", "anchors")
    assert (attention["share"], attention["mass"]) == ("group", 0.9)
    kept = attention["kept_mass"]
    assert 0 < kept["p5"] <= kept["mean"] <= 1
    assert kept["worst_layer_mean"] <= kept["mean"]
    assert attention["warning"] is None
    page = live.client.get("/metrics").text
    assert 'kvsieve:replies_total{attention="sparse"}' in page
    (count,) = [line for line in page.splitlines() if "kept_mass_count{" in line]
    assert float(count.split()[-1]) >= 1


def test_an_operators_bounds_hold_for_mass_too(smollm2: Served) -> None:
    policy = SparsePolicy(default=SparseAttention(k=4, selector="anchors"), min_k=2, max_k=5)
    with serving(smollm2, ServerConfig(port=0, sparse=policy)) as live:
        body = {"prompt": ids(400, seed=920), "max_tokens": 3, "sparse": {"mass": 1.0}}
        attention = live.client.post("/v1/completions", json=body).json()["attention"]
        assert (attention["mass"], attention["k"]) == (1.0, 5)
        assert attention["density"]["decode"] < 0.9


def test_a_slot_says_what_attention_it_runs(live: Live) -> None:
    body = {"prompt": ids(300, seed=930), "max_tokens": 200, "stream": True, "ignore_eos": True}
    body["sparse"] = {"k": 3, "selector": "even"}
    connection = begin(live, body)
    shown: list[Any] = []

    def runs() -> bool:
        slots = live.client.get("/slots").json()
        shown[:] = [slot["attention"] for slot in slots if slot["next_token"]["n_decoded"] > 2]
        return bool(shown)

    wait_until(runs)
    connection.close()
    assert (shown[0]["mode"], shown[0]["selector"], shown[0]["k"]) == ("sparse", "even", 3)
    assert 0 < shown[0]["density"]["decode"] < 0.5
    wait_until(lambda: is_idle(live))


def test_sampler_edges(client: openai.OpenAI) -> None:
    """Case SMP-01, the parts that a request can reach: these are all greedy."""
    best = greedy(client, "The capital of France is", max_tokens=4).choices[0].text
    for more in (
        {"temperature": 1e-6},
        {"temperature": 1e-320},
        {"temperature": 1.0, "top_p": 0},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "extra_body": {"top_k": 1}},
        {"temperature": 1.0, "extra_body": {"min_p": 1, "top_k": 0}},
    ):
        reply = greedy(client, "The capital of France is", max_tokens=4, **more)
        assert reply.choices[0].text == best, more
    for top_k in (0, -1, None, 10**9):
        more = {"temperature": 1.0, "seed": 1, "extra_body": {"top_k": top_k, "min_p": 0}}
        assert greedy(client, "The", max_tokens=2, top_p=1, **more).usage.completion_tokens == 2


def test_a_schema_is_kept(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "p", "schema": schema, "strict": True},
    }
    reply = client.chat.completions.create(
        messages=COLOURS, response_format=form, **{**GREEDY, "max_tokens": 60}
    )
    value = json.loads(reply.choices[0].message.content or "")
    assert value["name"] in ("Ada", "Bob")
    assert isinstance(value["age"], int)
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(
            messages=COLOURS, response_format=_person(), **{**GREEDY, "max_tokens": 2}
        )


def _person() -> Any:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    return Person


TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool | tojson }}"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("stream", [False, True])
def test_a_demanded_call_comes_whatever_the_model_is(smollm2: Served, stream: bool) -> None:
    """The model knows nothing of tools; the constraint makes it call one with fitting arguments."""
    parameters = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": parameters}}
    service: Any = smollm2.service
    served = served_model(service.llm, service, template_source=TOOLS_TEMPLATE)
    try:
        with (
            serving(served, ServerConfig(port=0)) as live,
            openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0) as client,
        ):
            reply: Any = client.chat.completions.create(
                **{**GREEDY, "max_tokens": 80},
                messages=[{"role": "user", "content": "Will it rain in Oslo?"}],
                tools=[tool],  # type: ignore[list-item]
                tool_choice="required",
                stream=stream,
            )
            if stream:
                chunks = [chunk.choices[0] for chunk in reply]
                reason = chunks[-1].finish_reason
                calls = [call for one in chunks for call in one.delta.tool_calls or []]
            else:
                reason, calls = reply.choices[0].finish_reason, reply.choices[0].message.tool_calls
    finally:
        served.close()
    (call,) = calls
    assert (reason, call.function.name) == ("tool_calls", "weather")
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Paris", "Oslo")
    assert arguments["days"] in (1, 2, 3)


def test_logit_bias_and_penalties_reach_the_engine(client: openai.OpenAI, served: Served) -> None:
    (paris,) = served.tokenizer.encode(" Paris", add_special=False)
    prompt = "The capital of France is"
    assert "Paris" in greedy(client, prompt, max_tokens=2).choices[0].text
    banned = greedy(client, prompt, max_tokens=2, logit_bias={str(paris): -100})
    assert "Paris" not in banned.choices[0].text
    repeated = greedy(client, "no no no no no no no", presence_penalty=2.0, frequency_penalty=2.0)
    assert " no no" not in repeated.choices[0].text


def test_leaving_early_gives_everything_back(live: Live, client: openai.OpenAI) -> None:
    """Case SRV-06: in a long prompt, after a few tokens, not streamed, waiting; then as if new."""
    for stream in (True, False):
        # Four run and two wait; all are in their prompts when they leave.
        bodies = [
            {"prompt": ids(900, seed=1000 + 10 * stream + k), "max_tokens": 100, "stream": stream}
            for k in range(6)
        ]
        connections = [begin(live, body) for body in bodies]
        wait_until(lambda: not is_idle(live))
        for connection in connections:
            connection.close()
    for seed in range(3):
        prompt = ids(5, seed=seed)
        chunks = client.completions.create(model="m", prompt=prompt, max_tokens=500, stream=True)
        for _, chunk in zip(range(3), chunks, strict=False):
            assert chunk.choices
        chunks.close()
    wait_until(lambda: is_idle(live))
    page = live.client.get("/metrics").text
    assert 'vllm:num_requests_running{model_name="SmolLM2-135M-Instruct.Q4_1"} 0.0' in page
    assert 'vllm:kv_cache_usage_perc{model_name="SmolLM2-135M-Instruct.Q4_1"} 0.0' in page
    reply = client.chat.completions.create(messages=COLOURS, **GREEDY)
    assert reply.choices[0].message.content


def test_a_prompt_that_does_not_fit(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        greedy(client, "word " * 3000)
    assert caught.value.body["n_ctx"] == 1024  # type: ignore[index]
    assert caught.value.body["n_prompt_tokens"] > 3000  # type: ignore[index]
    # Room for one more token, and no more.
    assert greedy(client, ids(1024, seed=3), max_tokens=9).usage.completion_tokens == 1
