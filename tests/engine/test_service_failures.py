"""Cancelled, refused and failing requests leave the service and the others as they were."""

import random
import threading

import numpy as np
import pytest

from kvsieve.engine import service as service_module
from kvsieve.engine.llm import LLM
from kvsieve.engine.requests import Failed, TokenEvent
from kvsieve.engine.sampling import SamplingParams
from kvsieve.errors import (
    CapacityError,
    ConfigError,
    KvsieveError,
    QueueFullError,
)
from tests.engine.serving import CONTEXT, MODES, Client, Gate, MakeService, held_blocks, make_ids

# -- cancelling ------


def test_cancelling_a_running_reply_keeps_what_there_is(make_service: MakeService):
    service = make_service()
    cancelled: list[Client] = []

    def stop(event: object) -> None:
        if isinstance(event, TokenEvent):
            cancelled[0].ticket.cancel()

    gate = Gate()
    blocker = Client(service, make_ids(5), on_event=gate)
    assert gate.entered.wait(60)
    cancelled.append(
        Client(
            service,
            make_ids(70),
            SamplingParams(max_tokens=150, ignore_eos=True),
            on_event=stop,
        )
    )
    gate.open()
    done = cancelled[0].completion
    assert done.finish_reason == "cancelled"
    assert len(done.token_ids) <= 2
    cancelled[0].ticket.cancel()
    assert blocker.completion
    # Its prompt stays for the next one.
    assert Client(service, make_ids(70)).cached == 69
    assert held_blocks(service) == 0


def test_cancelling_within_the_prompt_keeps_its_blocks(make_service: MakeService):
    service = make_service()
    clients: list[Client] = []
    ready = threading.Event()

    def stop(event: object) -> None:
        ready.wait(60)
        if clients[0].progress[-1][1] >= 64:
            clients[0].ticket.cancel()

    clients.append(Client(service, make_ids(250), on_event=stop))
    ready.set()
    done = clients[0].completion
    assert (done.finish_reason, done.token_ids) == ("cancelled", [])
    assert done.timings.prompt_n == 64
    assert Client(service, make_ids(250)).cached == 64
    assert held_blocks(service) == 0


def test_cancelling_a_queued_request(make_service: MakeService):
    service = make_service(max_sequences=1)
    gate = Gate()
    blocker = Client(service, make_ids(20), on_event=gate)
    assert gate.entered.wait(60)
    queued = Client(service, make_ids(30))
    queued.ticket.cancel()
    queued.ticket.cancel()
    gate.open()
    done = queued.completion
    assert (done.finish_reason, done.token_ids) == ("cancelled", [])
    assert queued.progress == []
    assert blocker.completion.finish_reason == "length"
    assert held_blocks(service) == 0


def test_a_listener_that_fails_cancels_its_request_and_nothing_else(make_service: MakeService):
    service = make_service()

    def fail(event: object) -> None:
        raise RuntimeError("gone")

    Client(service, make_ids(30), on_event=fail)
    assert Client(service, make_ids(31)).completion.finish_reason == "length"
    assert held_blocks(service) == 0
    assert service.metrics().finished["cancelled"] == 1


def test_random_cancels_leak_nothing_and_disturb_nobody(make_service: MakeService, served: LLM):
    service = make_service(max_sequences=3, cache_ram_bytes=40_000)
    chance = random.Random(1)
    modes = list(MODES.values())
    expected: dict[tuple[int, int], list[int]] = {}
    clients: list[tuple[Client, tuple[int, int]]] = []
    for number in range(60):
        count, mode = chance.choice([20, 90, 130, 200]), number % 3
        params = SamplingParams(max_tokens=12, ignore_eos=True)
        if (count, mode) not in expected:
            expected[count, mode] = served.generate(
                make_ids(count), params, sparse=modes[mode]
            ).token_ids
        patience = chance.choice([0, 1, 3, 6, 99])

        def listen(event: object, patience: int = patience, number: int = number) -> None:
            mine = [one for one, _ in clients if one.ticket.request_id == number]
            if mine and len(mine[0].events) > patience:
                mine[0].ticket.cancel()

        while True:
            try:
                client = Client(
                    service, make_ids(count), params, sparse=modes[mode], on_event=listen
                )
                break
            except QueueFullError:
                clients[-1][0].wait()
        clients.append((client, (count, mode)))
    completed = 0
    for client, key in clients:
        done = client.completion
        assert done.token_ids == expected[key][: len(done.token_ids)]
        completed += done.finish_reason == "length"
    assert 0 < completed < 60
    metrics = service.metrics()
    assert held_blocks(service) == 0
    assert (metrics.running, metrics.waiting, metrics.kv_usage) == (0, 0, 0)
    assert sum(metrics.finished.values()) == 60
    assert all(state.phase == "idle" for state in service.slots())


# -- limits and mistakes ------


def test_a_full_queue(make_service: MakeService):
    service = make_service(max_sequences=1, max_queue=2)
    gate = Gate()
    first = Client(service, make_ids(20), on_event=gate)
    assert gate.entered.wait(60)
    queued = [Client(service, make_ids(20)) for _ in range(2)]
    with pytest.raises(QueueFullError, match="at most 2 waiting requests") as raised:
        Client(service, make_ids(20))
    assert raised.value.retry_after_s >= 1
    assert service.metrics().waiting == 2
    gate.open()
    for client in (first, *queued):
        assert client.completion.finish_reason == "length"
    assert Client(service, make_ids(20)).completion


def test_what_cannot_run_is_refused_at_once(make_service: MakeService):
    service = make_service(max_sequences=2)
    with pytest.raises(CapacityError, match=f"at most {CONTEXT} tokens"):
        Client(service, make_ids(CONTEXT + 1))
    with pytest.raises(ConfigError, match="token ids from 0"):
        Client(service, [5, 10**6])
    with pytest.raises(ConfigError, match="token ids from 0"):
        Client(service, [-1])
    with pytest.raises(ConfigError, match="logit_bias"):
        Client(service, [5], SamplingParams(logit_bias={10**6: 1.0}))
    for slot in (2, -1, True, "0"):
        with pytest.raises(ConfigError, match=r"\[Service.submit\] slot: expected 0 to 1"):
            Client(service, [5], slot=slot)  # type: ignore[arg-type]
    assert service.metrics().waiting == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_sequences", 0),
        ("max_queue", -1),
        ("cache_ram_bytes", -1),
        ("max_prefill_share", 0),
        ("max_prefill_share", 1.5),
        ("max_prefill_share", float("nan")),
        ("max_sequences", True),
    ],
)
def test_settings_out_of_range(make_service: MakeService, name: str, value: object):
    with pytest.raises(ConfigError, match=rf"\[Service\] {name}: expected"):
        make_service(**{name: value})


def test_a_prefix_cache_beyond_memory_is_refused(make_service: MakeService):
    with pytest.raises(CapacityError, match="cache_ram_bytes: expected at most"):
        make_service(cache_ram_bytes=1 << 50)


def test_with_little_memory_long_requests_wait_for_each_other(
    make_service: MakeService,
    served: LLM,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    layout, config = served.cache_layout, served.config
    block_bytes = layout.page_bytes * config.num_layers * config.num_kv_heads
    monkeypatch.setattr(service_module, "available_memory", lambda: 15 * block_bytes)
    service = make_service(cache_ram_bytes=0)
    # Four fifths of 15 blocks are 12; four contexts would be 32.
    assert "room for 384 tokens in all, not 1024" in caplog.text
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    together: list[int] = []

    def count(event: object) -> None:
        together.append(sum(state.phase != "idle" for state in service.slots()))

    clients = [Client(service, make_ids(20, seed=i), long, on_event=count) for i in range(3)]
    assert [len(client.token_ids) for client in clients] == [200] * 3
    assert max(together) == 1  # of 219 tokens, so 7 blocks, two do not fit in 12
    together.clear()
    clients = [Client(service, make_ids(90, seed=i), on_event=count) for i in range(4)]
    assert [len(client.token_ids) for client in clients] == [8] * 4
    assert max(together) == 3  # of 97 tokens, so 4 blocks, three do
    assert held_blocks(service) == 0


def test_a_request_that_fails_leaves_the_others_alone(make_service: MakeService, served: LLM):
    service = make_service()
    banned = dict.fromkeys(range(served.config.vocab_size), -np.inf)
    bad = Client(service, make_ids(40), SamplingParams(logit_bias=banned))
    good = Client(service, make_ids(41))
    last = bad.wait()
    assert isinstance(last, Failed)
    assert "finite maximum" in str(last.error)
    assert good.completion.finish_reason == "length"
    assert held_blocks(service) == 0
    assert service.metrics().finished["error"] == 1


def test_a_fault_between_steps_is_told_to_everybody_and_survived(
    make_service: MakeService, monkeypatch: pytest.MonkeyPatch
):
    service = make_service(max_sequences=1)

    def broken(**_: object) -> int:
        raise ZeroDivisionError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(service._batcher.pace, "rows", broken)
        clients = [Client(service, make_ids(30)) for _ in range(3)]
        for client in clients:
            last = client.wait()
            assert isinstance(last, Failed)
            assert "a fault of ours" in str(last.error)
    assert Client(service, make_ids(30)).completion.finish_reason == "length"
    assert held_blocks(service) == 0


def test_a_listener_may_ask_the_service_itself(make_service: MakeService):
    service = make_service()
    Client(service, make_ids(40), slot=1).wait()
    erased: list[int] = []

    def erase(event: object) -> None:
        if not erased:
            erased.append(service.erase_slot(1))

    assert Client(service, make_ids(30, seed=1), slot=0, on_event=erase).completion
    assert erased == [47]


def test_a_step_that_fails_ends_only_whose_fault_it_is(
    make_service: MakeService, served: LLM, monkeypatch: pytest.MonkeyPatch
):
    service = make_service()
    forward = served.engine.runner.forward

    def failing(batch: object, **settings: object) -> object:
        if any(step.sequence.prompt_len == 77 for step in batch.steps):  # type: ignore[attr-defined]
            raise ZeroDivisionError("a fault of ours")
        return forward(batch, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(served.engine.runner, "forward", failing)
    clients = [Client(service, make_ids(count)) for count in (50, 77, 60)]
    last = clients[1].wait()
    assert isinstance(last, Failed)
    assert isinstance(last.error, KvsieveError)
    assert "a fault of ours" in str(last.error)
    assert clients[0].completion.finish_reason == "length"
    assert clients[2].completion.finish_reason == "length"
    assert held_blocks(service) == 0
