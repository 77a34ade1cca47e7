"""Slots on disk: what one service saved, another one goes on from."""

import threading
from pathlib import Path

import pytest

from kvsieve.engine.llm import LLM
from kvsieve.engine.sampling import SamplingParams
from kvsieve.errors import CapacityError, ConfigError, SlotFileError
from tests.engine.serving import MODES, Client, Gate, MakeService, held_blocks, make_ids

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("mode", MODES)
def test_another_service_goes_on_from_a_saved_slot(
    make_service: MakeService, served: LLM, tmp_path: Path, mode: str
):
    prompt, sparse = make_ids(200), MODES[mode]
    first = make_service()
    cold = Client(first, prompt, PARAMS, sparse=sparse, slot=1)
    assert cold.completion
    # Exact rows of the reply are kept too; sparse ones nobody else would compute.
    kept = 207 if sparse is None else 200
    saved = first.save_slot(1, tmp_path / "one")
    assert saved.num_tokens == first.slots()[1].num_tokens == kept
    assert saved.num_bytes == (tmp_path / "one").stat().st_size
    second = make_service()
    restored = second.restore_slot(0, tmp_path / "one")
    assert (restored.num_tokens, restored.num_bytes) == (kept, saved.num_bytes)
    assert second.slots()[0].num_tokens == kept
    again = Client(second, prompt, PARAMS, sparse=sparse)
    assert again.token_ids == cold.token_ids
    needs_more = sparse is not None and sparse.selector not in ("window", "oracle", "random")
    assert again.cached == (192 if needs_more else 199)
    assert again.completion.attention.decode == cold.completion.attention.decode
    assert held_blocks(second) == 0
    assert held_blocks(first) == 0


def test_erasing_forgets_what_nothing_else_needs(make_service: MakeService):
    service = make_service()
    Client(service, make_ids(100), PARAMS, slot=0).wait()
    assert service.erase_slot(0) == 107
    assert service.slots()[0].num_tokens == 0
    assert service.erase_slot(0) == 0
    assert Client(service, make_ids(100), PARAMS).cached == 0


def test_a_busy_slot_or_an_empty_one(make_service: MakeService, tmp_path: Path):
    service = make_service()
    with pytest.raises(ConfigError, match="keeps none"):
        service.save_slot(0, tmp_path / "none")
    for call in (service.save_slot, service.restore_slot):
        with pytest.raises(ConfigError, match="slot: expected 0 to 3"):
            call(4, tmp_path / "none")
    with pytest.raises(ConfigError, match="slot: expected 0 to 3"):
        service.erase_slot(-1)
    Client(service, make_ids(40), PARAMS, slot=0).wait()
    service.save_slot(0, tmp_path / "one")
    gate = Gate()

    def hold(event: object) -> None:
        gate(event)  # type: ignore[arg-type]

    client = Client(service, make_ids(60), PARAMS, slot=0, on_event=hold)
    assert gate.entered.wait(60)
    results: list[BaseException] = []

    def expect_busy(call: object, *arguments: object) -> None:
        try:
            call(*arguments)  # type: ignore[operator]
        except ConfigError as error:
            results.append(error)

    # The calls wait for the engine's thread, which the gate holds: it opens a little later.
    threads = [
        threading.Thread(target=expect_busy, args=(call, 0, *rest))
        for call, rest in (
            (service.save_slot, (tmp_path / "two",)),
            (service.restore_slot, (tmp_path / "one",)),
            (service.erase_slot, ()),
        )
    ]
    for thread in threads:
        thread.start()
    while len(service._calls) < 3:
        pass
    gate.open()
    for thread in threads:
        thread.join(60)
    assert len(results) == 3
    assert all("expected an idle one, got 0, busy" in str(error) for error in results)
    assert not (tmp_path / "two").exists()
    assert client.completion


def test_a_damaged_file_changes_nothing(make_service: MakeService, tmp_path: Path):
    service = make_service()
    Client(service, make_ids(100), PARAMS, slot=0).wait()
    service.save_slot(0, tmp_path / "one")
    data = bytearray((tmp_path / "one").read_bytes())
    data[-500] ^= 1
    (tmp_path / "one").write_bytes(data)
    other = make_service()
    Client(other, make_ids(50, seed=1), PARAMS, slot=0).wait()
    with pytest.raises(SlotFileError, match=r"one: expected the checksum"):
        other.restore_slot(0, tmp_path / "one")
    assert other.slots()[0].num_tokens == 57
    assert Client(other, make_ids(50, seed=1), PARAMS).cached == 49
    assert Client(other, make_ids(100), PARAMS).cached == 0


def test_a_file_larger_than_the_prefix_cache(make_service: MakeService, tmp_path: Path):
    service = make_service()
    Client(service, make_ids(200), PARAMS, slot=0).wait()
    service.save_slot(0, tmp_path / "one")
    with pytest.raises(CapacityError, match="prefix cache may have"):
        make_service(cache_ram_bytes=1000).restore_slot(0, tmp_path / "one")


def test_restoring_what_is_there_already(make_service: MakeService, tmp_path: Path):
    service = make_service()
    Client(service, make_ids(100), PARAMS, slot=0).wait()
    service.save_slot(0, tmp_path / "one")
    before = service.metrics().cached_bytes
    service.restore_slot(2, tmp_path / "one")
    assert service.metrics().cached_bytes == before
    assert [state.num_tokens for state in service.slots()] == [107, 0, 107, 0]
    assert held_blocks(service) == 0
