"""What OpenAI's client relies on: errors, keys, models, and servers that share nothing."""

from pathlib import Path
from typing import Any

import openai
import pytest

from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.errors import NumericalError, QueueFullError
from kvsieve.server.config import ServerConfig, SparsePolicy
from kvsieve.server.served import Served
from tests.server.conftest import CONTEXT, fake_served
from tests.server.fake_service import FakeService
from tests.server.live import TEXT, Live, serving, wait_until

HI: Any = [{"role": "user", "content": "Hi"}]


# -- errors --------------------------------------------------------------------------------


def test_a_client_mistake_is_a_bad_request_with_all_fields(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="m", messages=HI, temperature=-1)
    body: Any = caught.value.body
    assert set(body) == {"message", "type", "code", "param"}
    assert (body["type"], body["param"]) == ("invalid_request_error", "temperature")
    assert "expected" in body["message"]
    assert "-1" in body["message"]
    assert caught.value.request_id is not None
    assert caught.value.request_id.startswith("req_")


def test_every_reply_has_a_request_id(client: openai.OpenAI) -> None:
    one = client.chat.completions.create(model="m", messages=HI)
    other = client.chat.completions.create(model="m", messages=HI)
    assert one._request_id
    assert one._request_id != other._request_id


def test_a_prompt_beyond_the_context_is_a_400_with_both_numbers(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="m", prompt=[5] * (CONTEXT + 1), stream=stream)
        body: Any = caught.value.body
        assert body["type"] == "exceed_context_size_error"
        assert (body["n_prompt_tokens"], body["n_ctx"]) == (CONTEXT + 1, CONTEXT)


def test_a_full_queue_is_a_429_that_says_when_to_come_back(
    client: openai.OpenAI, service: FakeService
) -> None:
    service.room = 0
    with pytest.raises(openai.RateLimitError) as caught:
        client.chat.completions.create(model="m", messages=HI)
    assert caught.value.response.headers["retry-after"] == "3"


def test_the_client_retries_a_full_queue_by_itself(
    live: Live, service: FakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It obeys Retry-After, so a short one is a matter of seconds and not an error."""
    refusals = []
    submit = service.submit

    def sometimes(request: Any, on_event: Any) -> Any:
        if not refusals:
            refusals.append(1)
            raise QueueFullError("full", retry_after_s=0.2)
        return submit(request, on_event)

    monkeypatch.setattr(service, "submit", sometimes)
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any") as client:
        reply = client.chat.completions.create(model="m", messages=HI)
    assert reply.choices[0].message.content == TEXT
    assert len(refusals) == 1


def test_half_of_a_request_that_does_not_fit_the_queue_is_not_left_running(
    client: openai.OpenAI, service: FakeService
) -> None:
    service.room = 1
    service.go.clear()
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="m", prompt="x", n=2)
    wait_until(lambda: not service.running)


def test_keys(served: Served) -> None:
    config = ServerConfig(port=0, api_keys=("sesame", "öpen"))
    with serving(served, config) as live:
        for key, opens in (("sesame", True), ("Sesame", False), ("sesam", False)):
            with openai.OpenAI(base_url=f"{live.url}/v1", api_key=key, max_retries=0) as client:
                if opens:
                    assert client.models.list().data
                    continue
                with pytest.raises(openai.AuthenticationError) as caught:
                    client.models.list()
                assert caught.value.body["type"] == "authentication_error"  # type: ignore[index]
        assert live.client.get("/v1/models").status_code == 401
        assert live.client.get("/metrics").status_code == 401
        assert live.client.get("/v1/models", headers={"X-Api-Key": "sesame"}).status_code == 200
        for path in ("/health", "/v1/health", "/health/"):
            assert live.client.get(path).json() == {"status": "ok"}


def test_what_the_operator_does_not_allow(served: Served, service: FakeService) -> None:
    fixed = ServerConfig(port=0, sparse=SparsePolicy(per_request=False))
    with serving(served, fixed) as live:
        url = f"{live.url}/v1"
        with openai.OpenAI(base_url=url, api_key="any", max_retries=0) as client:
            asked: Any = {"model": "m", "messages": HI}
            with pytest.raises(openai.PermissionDeniedError, match="setting is fixed"):
                client.chat.completions.create(**asked, extra_body={"sparse": {"k": 4}})
            assert client.chat.completions.create(**asked).choices


def test_an_error_in_a_stream_that_began_is_raised_by_the_client(
    client: openai.OpenAI, service: FakeService
) -> None:
    service.fail = NumericalError("[sample] logits: expected a finite maximum, got nan")
    stream = client.chat.completions.create(model="m", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="finite maximum"):
        list(stream)
    with pytest.raises(openai.InternalServerError, match="finite maximum"):
        client.chat.completions.create(model="m", messages=HI)


def test_unknown_models(client: openai.OpenAI) -> None:
    """Documented: a request may name any model, and the one that is served answers."""
    assert client.chat.completions.create(model="gpt-3.5-turbo", messages=HI).model == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-3.5-turbo")


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "kvsieve")
    assert isinstance(model.created, int)
    assert model == client.models.retrieve("tiny")
    extra: Any = model.model_extra
    assert extra["max_model_len"] == CONTEXT
    assert extra["meta"]["n_ctx_train"] == CONTEXT
    assert extra["meta"]["n_vocab"] == 288


def test_what_is_not_there_is_a_404_and_not_tried_again(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="m", input="x")


def test_closing_a_stream_ends_its_generation(client: openai.OpenAI, service: FakeService) -> None:
    service.pause_s = 0.01
    service.script = lambda _: [*service.tokenizer.encode("x")] * 10_000
    stream = client.chat.completions.create(model="m", messages=HI, stream=True)
    for _, chunk in zip(range(4), stream, strict=False):
        assert chunk.choices
    stream.close()
    wait_until(lambda: service.tickets[0].ended.is_set())
    assert service.tickets[0].said < 5000


def test_two_servers_share_nothing(tokenizer: Tokenizer, tiny_file: Path, live: Live) -> None:
    other = FakeService(tokenizer, "other")
    with serving(fake_served(other, tiny_file), ServerConfig(port=0, alias="two")) as second:
        reply = second.client.post("/v1/completions", json={"prompt": "x"}).json()
        assert (reply["model"], reply["choices"][0]["text"]) == ("two", "other")
        reply = live.client.post("/v1/completions", json={"prompt": "x"}).json()
        assert (reply["model"], reply["choices"][0]["text"]) == ("tiny", TEXT)
