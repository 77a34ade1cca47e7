"""The service from end to end on a tiny model: events, batches, order, metrics, ending."""

import threading
from collections.abc import Callable

import pytest

from kvsieve.engine.llm import LLM
from kvsieve.engine.requests import Finished, GenerationRequest, TokenEvent
from kvsieve.engine.sampling import SamplingParams
from kvsieve.errors import ServiceClosedError
from tests.engine.serving import MODES, Client, Gate, MakeService, make_ids

# -- one request ------


def test_events_come_in_order_and_join_to_the_completion(make_service: MakeService, served: LLM):
    client = Client(make_service(), make_ids(150))
    done = client.completion
    assert client.progress == [(0, 0, 150), (0, 64, 150), (0, 128, 150), (0, 150, 150)]
    assert [token.token_id for token in client.tokens] == done.token_ids
    assert len(done.token_ids) == 8
    last = client.events[-1]
    assert isinstance(last, Finished)
    assert "".join(token.text for token in client.tokens) + last.text == done.text
    assert [token.timing is None for token in client.tokens] == [True] + [False] * 7
    assert done.prompt_tokens == done.timings.prompt_n == 150
    assert done.finish_reason == "length"
    assert done.attention.mode == "exact"
    alone = served.generate(make_ids(150), SamplingParams(max_tokens=8, ignore_eos=True))
    assert done.token_ids == alone.token_ids


def test_no_tokens_asked_for(make_service: MakeService):
    done = Client(make_service(), make_ids(40), SamplingParams(max_tokens=0)).completion
    assert (done.token_ids, done.finish_reason) == ([], "length")


def test_a_seed_gives_the_same_tokens_again(make_service: MakeService):
    service = make_service()
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    first, again = (Client(service, make_ids(40), params).token_ids for _ in range(2))
    assert first == again
    other = SamplingParams(max_tokens=12, temperature=1.0, seed=6, ignore_eos=True)
    assert Client(service, make_ids(40), other).token_ids != first


# -- several at once (BAT-01: alone or together, the same) ------


@pytest.mark.parametrize("mode", MODES)
def test_four_together_say_what_each_says_alone(make_service: MakeService, served: LLM, mode: str):
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.0, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=30, temperature=0.8, top_p=0.9, seed=4, ignore_eos=True),
        SamplingParams(max_tokens=15, repeat_penalty=1.3, ignore_eos=True),
    ]
    prompts = [make_ids(count, seed=count) for count in (200, 33, 131, 64)]
    alone = [
        served.generate(prompt, one, sparse=MODES[mode]).token_ids
        for prompt, one in zip(prompts, params, strict=True)
    ]
    service = make_service()
    clients = [
        Client(service, prompt, one, sparse=MODES[mode])
        for prompt, one in zip(prompts, params, strict=True)
    ]
    assert [client.token_ids for client in clients] == alone
    metrics = service.metrics()
    assert metrics.step_sequences > metrics.steps  # some steps did hold several


def test_mixed_modes_in_one_batch(make_service: MakeService, served: LLM):
    prompt = make_ids(180)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    alone = {
        name: served.generate(prompt, params, sparse=mode).token_ids for name, mode in MODES.items()
    }
    service = make_service()
    clients = {name: Client(service, prompt, params, sparse=mode) for name, mode in MODES.items()}
    assert {name: client.token_ids for name, client in clients.items()} == alone
    assert clients["probe"].completion.attention.mode == "sparse"
    assert clients["exact"].completion.attention.mode == "exact"


def test_a_running_reply_gets_its_tokens_while_a_long_prompt_is_read(make_service: MakeService):
    service = make_service(max_prefill_share=0.5)
    order: list[str] = []
    gate = Gate()

    def hold(event: object) -> None:
        order.append("token" if isinstance(event, TokenEvent) else "other")
        if len(order) == 3:
            gate(event)  # type: ignore[arg-type]

    running = Client(
        service, make_ids(20), SamplingParams(max_tokens=200, ignore_eos=True), on_event=hold
    )
    assert gate.entered.wait(60)
    reading = Client(service, make_ids(250, seed=1), on_event=lambda event: order.append("chunk"))
    gate.open()
    assert reading.completion
    assert running.completion
    first, last = order.index("chunk"), max(i for i, one in enumerate(order) if one == "chunk")
    between = order[first:last]
    # 250 tokens in chunks of at most 64: every chunk came with a token of the running reply.
    assert between.count("token") >= 4


def test_prompts_are_read_in_the_order_they_came_whatever_their_slots(make_service: MakeService):
    service = make_service(max_sequences=3)
    order: list[str] = []
    gate = Gate()
    nothing = SamplingParams(max_tokens=0)
    first = Client(service, make_ids(10), nothing, slot=1, on_event=gate)
    assert gate.entered.wait(60)
    clients = [
        Client(
            service,
            make_ids(200, seed=seed),
            nothing,
            slot=slot,
            on_event=lambda event, name=name: order.append(name),  # type: ignore[misc]
        )
        for seed, slot, name in ((1, 2, "a"), (2, 0, "b"))
    ]
    gate.open()
    for client in (first, *clients):
        assert client.completion
    # Five times of progress and the end each; the second prompt begins with what rows the
    # first one's last chunk leaves over.
    assert sorted(order) == ["a"] * 6 + ["b"] * 6
    assert order[:4] == ["a"] * 4
    assert order[-4:] == ["b"] * 4


def test_requests_are_served_in_order(make_service: MakeService):
    service = make_service(max_sequences=1)
    finished: list[int] = []

    def note(number: int) -> Callable[[object], None]:
        return lambda event: finished.append(number) if isinstance(event, Finished) else None

    clients = [Client(service, make_ids(40 - 5 * i, seed=i), on_event=note(i)) for i in range(6)]
    for client in clients:
        assert client.completion
    assert finished == list(range(6))


# -- slots, metrics, ending ------


def test_a_request_may_ask_for_its_slot(make_service: MakeService):
    service = make_service(max_sequences=3)
    gate = Gate()
    first = Client(service, make_ids(20), slot=2, on_event=gate)
    assert gate.entered.wait(60)
    states = service.slots()
    assert [state.phase for state in states] == ["idle", "idle", "prompt"]
    assert states[2].request_id == first.ticket.request_id
    assert states[2].prompt_tokens == 20
    waiting = Client(service, make_ids(21), slot=2)
    other = Client(service, make_ids(22))
    gate.open()
    assert other.completion
    assert waiting.completion
    assert service.slots()[2].num_tokens == 21 + 7


def test_metrics_add_up(make_service: MakeService):
    service = make_service()
    for _ in range(2):
        Client(service, make_ids(100)).wait()
    assert service.drain(60)
    metrics = service.metrics()
    assert (metrics.prompt_tokens, metrics.generated_tokens) == (100 + 1, 16)
    assert (metrics.prefix_queries, metrics.prefix_hits) == (200, 99)
    assert metrics.finished == {"length": 2}
    assert metrics.largest_sequence == 107
    assert metrics.num_slots == 4
    assert metrics.cached_bytes > 0
    assert 0 < metrics.prompt_seconds < 60
    counts = {name: sum(one.counts) for name, one in metrics.histograms.items()}
    assert counts.pop("inter_token_latency_seconds") == 14
    assert set(counts.values()) == {2}
    assert metrics.histograms["request_generation_tokens"].total == 16


def test_a_drained_service_takes_nothing_more(make_service: MakeService):
    service = make_service()
    client = Client(service, make_ids(100))
    assert service.drain(60)
    assert client.completion.finish_reason == "length"
    with pytest.raises(ServiceClosedError):
        Client(service, make_ids(5))


def test_draining_gives_up_after_a_while(make_service: MakeService):
    service = make_service()
    gate = Gate()
    client = Client(service, make_ids(10), on_event=gate)
    assert gate.entered.wait(60)
    assert not service.drain(0.01)
    gate.open()
    assert service.drain(60)
    assert client.completion


def test_closing_ends_everything(make_service: MakeService):
    service = make_service(max_sequences=1)
    gate = Gate()
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    clients = [Client(service, make_ids(10), params, on_event=gate)]
    assert gate.entered.wait(60)
    clients += [Client(service, make_ids(10), params) for _ in range(2)]
    closing = threading.Thread(target=service.close)
    closing.start()
    gate.open()
    closing.join(60)
    assert not closing.is_alive()
    assert {client.completion.finish_reason for client in clients} == {"cancelled"}
    service.close()
    with pytest.raises(ServiceClosedError):
        service.erase_slot(0)


def test_submitting_from_many_threads(make_service: MakeService, served: LLM):
    service = make_service(max_queue=100)
    results: dict[int, list[int]] = {}

    def run(number: int) -> None:
        results[number] = Client(service, make_ids(30 + number % 3)).token_ids

    threads = [threading.Thread(target=run, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    alone = [served.generate(make_ids(30 + i), params).token_ids for i in range(3)]
    assert [results[i] for i in range(24)] == [alone[i % 3] for i in range(24)]


def test_the_request_is_a_value(served: LLM):
    request = GenerationRequest(prompt_ids=(1, 2), params=SamplingParams())
    assert request == GenerationRequest(prompt_ids=(1, 2), params=SamplingParams())
