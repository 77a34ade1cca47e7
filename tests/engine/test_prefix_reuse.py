"""What a request takes from earlier ones: the same bits as a cold run, and no more than that."""

import time

import pytest

from kvsieve.attention.config import SelectorName, SparseAttention
from kvsieve.engine.llm import LLM
from kvsieve.engine.requests import Event
from kvsieve.engine.sampling import SamplingParams
from tests.engine.serving import MODES, Client, MakeService, make_ids


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 63, 64, 65, 150])
def test_a_second_identical_request_equals_a_cold_run(
    make_service: MakeService, served: LLM, count: int
):
    prompt = make_ids(count)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    cold = served.generate(prompt, params).token_ids
    service = make_service()
    first, second = Client(service, prompt), None
    assert first.token_ids == cold
    assert first.cached == 0
    second = Client(service, prompt)
    assert second.token_ids == cold
    # All but the last token: something has to run to give logits.
    assert second.cached == count - 1
    assert second.completion.prompt_tokens == count
    assert second.completion.timings.prompt_n == 1
    third = Client(service, prompt[: max(1, count - 5)])
    assert third.token_ids == served.generate(prompt[: max(1, count - 5)], params).token_ids
    assert third.cached == max(1, count - 5) - 1
    assert Client(service, make_ids(5, seed=9)).completion.finish_reason == "length"


def test_what_was_generated_exactly_is_reused(make_service: MakeService, served: LLM):
    service = make_service()
    prompt = make_ids(50)
    reply = Client(service, prompt, SamplingParams(max_tokens=40, ignore_eos=True)).token_ids
    longer = prompt + reply + make_ids(20, seed=3)
    following = Client(service, longer)
    assert following.cached == 50 + 39  # the last token of the reply never ran
    assert (
        following.token_ids
        == served.generate(longer, SamplingParams(max_tokens=8, ignore_eos=True)).token_ids
    )


def test_a_prompt_that_goes_another_way_inside_a_block_shares_what_is_common(
    make_service: MakeService, served: LLM
):
    service = make_service()
    one = make_ids(100)
    other = [*one[:75], *make_ids(60, seed=8)]
    Client(service, one).wait()
    client = Client(service, other)
    assert client.cached == 75
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    assert client.token_ids == served.generate(other, params).token_ids
    # And the first one has not been harmed by it.
    again = Client(service, one)
    assert again.cached == 99
    assert again.token_ids == served.generate(one, params).token_ids


def test_nothing_is_shared_by_who_does_not_want_it(make_service: MakeService):
    service = make_service()
    prompt = make_ids(100)
    Client(service, prompt, cache_prompt=False).wait()
    assert Client(service, prompt).cached == 0
    assert Client(service, prompt, cache_prompt=False).cached == 0
    assert Client(service, prompt).cached == 99


def test_four_equal_prompts_at_once_are_read_once(make_service: MakeService):
    service = make_service()
    prompt = make_ids(200)
    clients = [Client(service, prompt) for _ in range(4)]
    assert len({tuple(client.token_ids) for client in clients}) == 1
    cached = sorted(client.cached for client in clients)
    # The others waited for the first: they find its blocks, and the open one if it has ended.
    assert cached[0] == 0
    assert set(cached[1:]) <= {192, 199}


# Tiles 0 and 1 are exact, those of the tail too; prompts are chosen so that both matter.
SPARSE_PROMPT = 200


@pytest.mark.parametrize("mode", ["probe", "even"])
def test_sparse_runs_repeat_bit_for_bit_from_the_cache(
    make_service: MakeService, served: LLM, mode: str
):
    service = make_service()
    prompt = make_ids(SPARSE_PROMPT)
    params = SamplingParams(max_tokens=30, ignore_eos=True)
    cold = served.generate(prompt, params, sparse=MODES[mode])
    clients = [Client(service, prompt, params, sparse=MODES[mode]) for _ in range(1)]
    clients[0].wait()
    clients.append(Client(service, prompt, params, sparse=MODES[mode]))
    assert [client.token_ids for client in clients] == [cold.token_ids] * 2
    assert [client.cached for client in clients] == [0, 192]
    # What was read in decode is counted the same: the same blocks were chosen.
    assert clients[1].completion.attention.decode == cold.attention.decode


@pytest.mark.parametrize("mode", ["probe", "even"])
def test_a_longer_prompt_reuses_only_what_it_would_compute_itself(
    make_service: MakeService, served: LLM, mode: str
):
    service = make_service()
    sparse = MODES[mode]
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    prompt = make_ids(150)
    reply = Client(service, prompt, params, sparse=sparse).token_ids
    longer = prompt + reply + make_ids(60, seed=4)
    client = Client(service, longer, params, sparse=sparse)
    assert client.token_ids == served.generate(longer, params, sparse=sparse).token_ids
    # Selector data is kept at 128 tokens, the last block before the prompt's end; with an exact
    # tail of 32 tokens block 3 was exact in the first prompt, and would not be in the second.
    assert client.cached == (0 if mode == "probe" else 128)


def test_exact_and_sparse_runs_do_not_mix(make_service: MakeService, served: LLM):
    service = make_service()
    prompt = make_ids(SPARSE_PROMPT)
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    for mode in ("exact", "even", "probe", "exact", "even", "probe"):
        client = Client(service, prompt, params, sparse=MODES[mode])
        assert client.token_ids == served.generate(prompt, params, sparse=MODES[mode]).token_ids


SPARSE_MODES = [name for name, sparse in MODES.items() if sparse is not None]


@pytest.mark.parametrize("mode", SPARSE_MODES)
def test_a_conversation_goes_on_behind_its_last_reply_if_that_is_wanted(
    make_service: MakeService, mode: str
):
    sparse = MODES[mode]
    service = make_service(reuse_generated=True)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    first = Client(service, make_ids(130, seed=3), params, sparse=sparse)
    # The last token of a reply has not been through the model.
    said = [*make_ids(130, seed=3), *first.token_ids]
    turn = [*said, *make_ids(20, seed=4)]
    few = SamplingParams(max_tokens=6, ignore_eos=True)
    second = Client(service, turn, few, sparse=sparse)
    assert second.cached == (len(said) - 1) // 32 * 32
    # What selectors keep is saved up to the end of a block, with nothing of the tokens behind it.
    for entry in service._batcher.prefix._entries.values():
        assert all(one.num_tokens % 32 == 0 for one in entry.snapshots.values())
    # The same again, from what both have left; and nothing of it for other settings.
    third = Client(service, turn, few, sparse=sparse)
    assert third.token_ids == second.token_ids
    assert third.cached >= second.cached
    exact = Client(service, turn, few)
    assert exact.cached == 0
    without = make_service()
    Client(without, make_ids(130, seed=3), params, sparse=sparse).wait()
    assert Client(without, turn, few, sparse=sparse).cached < second.cached


@pytest.mark.parametrize("selector", ["probe", "even", "anchors", "window"])
def test_what_is_reused_of_a_reply_is_what_was_there(
    make_service: MakeService, served: LLM, selector: SelectorName
):
    """Where everything fits the budget sparse is exact, so every turn has one right answer.

    The replies could outgrow the budget, for which the selector keeps its data, but are cancelled
    before they do.
    """
    sparse = SparseAttention(k=7, selector=selector, dense_tail=0)
    service = make_service(reuse_generated=True)
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    said, kept = make_ids(65, seed=5), 0
    for turn in range(3):
        said += make_ids(5, seed=turn)
        box: list[Client] = []

        def stop(event: Event, box: list[Client] = box) -> None:
            while not box:
                time.sleep(0.001)
            if len(box[0].tokens) >= 20:
                box[0].ticket.cancel()

        box.append(Client(service, said, endless, sparse=sparse, on_event=stop))
        tokens = box[0].token_ids
        assert len(tokens) == 20
        params = SamplingParams(max_tokens=len(tokens), ignore_eos=True)
        assert tokens == served.generate(said, params).token_ids
        assert box[0].cached == kept
        said = said + tokens
        kept = (len(said) - 1) // 32 * 32
