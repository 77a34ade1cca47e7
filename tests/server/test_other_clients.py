"""litellm and LangChain, unchanged, on a real model (`make test-clients` installs them)."""

import os
from typing import Any

import pytest

from tests.server.live import Live

MESSAGES = [{"role": "user", "content": "Name three colours."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 10}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def litellm() -> Any:
    # It would ask the internet what models cost.
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    return pytest.importorskip("litellm", reason="the client is not installed")


@pytest.fixture(scope="module")
def langchain() -> Any:
    return pytest.importorskip("langchain_openai", reason="the client is not installed")


def asked(live: Live, **more: Any) -> dict[str, Any]:
    return {
        "model": "openai/anything",
        "api_base": f"{live.url}/v1",
        "api_key": "x",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": 12,
        "num_retries": 0,
        **more,
    }


@pytest.mark.filterwarnings("ignore")
def test_litellm(litellm: Any, smollm2_live: Live) -> None:
    whole = litellm.completion(**asked(smollm2_live))
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 12
    assert whole.attention["mode"] == "exact"
    options = {"include_usage": True}
    chunks = list(litellm.completion(**asked(smollm2_live), stream=True, stream_options=options))
    text = "".join(one.choices[0].delta.content or "" for one in chunks if one.choices)
    assert text == whole.choices[0].message.content
    # Clients that join chunks go by these.
    assert len({one.id for one in chunks}) == len({one.model for one in chunks}) == 1
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    several = litellm.completion(**asked(smollm2_live, n=2, temperature=1.0))
    assert [choice.index for choice in several.choices] == [0, 1]
    texts = {0: "", 1: ""}
    for chunk in litellm.completion(**asked(smollm2_live, n=2), stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts[0] == texts[1] == text


@pytest.mark.filterwarnings("ignore")
def test_litellm_on_mistakes(litellm: Any, smollm2_live: Live) -> None:
    too_long = [{"role": "user", "content": "word " * 3000}]
    with pytest.raises(litellm.exceptions.BadRequestError, match="at most 1024 tokens"):
        litellm.completion(**asked(smollm2_live, messages=too_long))
    with pytest.raises(litellm.exceptions.BadRequestError, match="temperature: expected"):
        litellm.completion(**asked(smollm2_live, temperature=-1))


def chat(langchain: Any, live: Live, **more: Any) -> Any:
    settings = {"temperature": 0, "max_tokens": 12, "max_retries": 0, **more}
    return langchain.ChatOpenAI(base_url=f"{live.url}/v1", api_key="x", model="m", **settings)


@pytest.mark.filterwarnings("ignore")
def test_langchain(langchain: Any, smollm2_live: Live) -> None:
    model = chat(langchain, smollm2_live, stream_usage=True)
    whole = model.invoke("Name three colours.")
    assert whole.usage_metadata["output_tokens"] == 12
    assert whole.response_metadata["finish_reason"] == "length"
    pieces = list(model.stream("Name three colours."))
    assert "".join(piece.content for piece in pieces) == whole.content
    joined = pieces[0]
    for piece in pieces[1:]:
        joined += piece
    assert joined.usage_metadata["total_tokens"] == whole.usage_metadata["total_tokens"]
    assert [reply.content for reply in model.batch(["Name three colours."] * 2)] == (
        [whole.content] * 2
    )
    logged = chat(langchain, smollm2_live, logprobs=True, top_logprobs=2).invoke("Hi")
    assert logged.response_metadata["logprobs"]["content"][0]["top_logprobs"]


@pytest.mark.filterwarnings("ignore")
def test_langchain_with_a_schema(langchain: Any, smollm2_live: Live) -> None:
    model = chat(langchain, smollm2_live, max_tokens=100)
    schema = {"title": "Person", **SCHEMA}
    model = model.with_structured_output(schema, method="json_schema")
    found = model.invoke("Ada is 36; as JSON.")
    assert set(found) == {"name", "age"}


@pytest.mark.filterwarnings("ignore")
def test_langchain_on_mistakes(langchain: Any, smollm2_live: Live) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="at most 1024 tokens"):
        chat(langchain, smollm2_live).invoke("word " * 3000)
