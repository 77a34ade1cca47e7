"""Health, models, props, slots and metrics, and llama.cpp's own endpoints for text."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvsieve.attention.config import SparseAttention
from kvsieve.server.config import ServerConfig, SparsePolicy
from kvsieve.server.served import Served
from tests.server.fake_service import HISTOGRAMS, FakeService
from tests.server.live import Live, serving

LLAMA = {
    "prompt_tokens_total": 50,
    "prompt_seconds_total": 2,
    "prompt_tokens_seconds": 25,
    "tokens_predicted_total": 30,
    "tokens_predicted_seconds_total": 3,
    "predicted_tokens_seconds": 10,
    "requests_processing": 0,
    "requests_deferred": 1,
    "n_tokens_max": 99,
    "n_decode_total": 10,
    "n_busy_slots_per_decode": 1.5,
}
VLLM = {
    "num_requests_running": 0,
    "num_requests_waiting": 1,
    "kv_cache_usage_perc": 0.25,
    "prefix_cache_queries_total": 80,
    "prefix_cache_hits_total": 30,
    "prompt_tokens_total": 80,
    "generation_tokens_total": 30,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "slots"
    folder.mkdir()
    return folder


@pytest.fixture
def saving(served: Served, service: FakeService, folder: Path) -> Iterator[Live]:
    with serving(served, ServerConfig(port=0, slot_save_path=str(folder))) as live:
        yield live


def test_metrics(live: Live) -> None:
    page = live.client.get("/metrics")
    assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.text)
        for sample in family.samples
    }
    for name, value in LLAMA.items():
        assert samples[f"llamacpp:{name}", ()] == value
    label = ("model_name", "tiny")
    for name, value in VLLM.items():
        assert samples[f"vllm:{name}", (label,)] == value
    for name in HISTOGRAMS:
        bucket = f"vllm:{name}_bucket"
        counts = [samples[bucket, (("le", le), label)] for le in ("0.5", "1", "+Inf")]
        # The engine counts each bucket alone, Prometheus all below it too.
        assert counts == [3, 5, 6]
        assert samples[f"vllm:{name}_sum", (label,)] == 4.25
        assert samples[f"vllm:{name}_count", (label,)] == 6
    assert samples["kvsieve:replies_total", (("attention", "sparse"),)] == 3
    for phase, read, causal in (("prefill", 60, 80), ("decode", 5, 20)):
        assert samples["kvsieve:attention_blocks_read_total", (("phase", phase),)] == read
        assert samples["kvsieve:attention_blocks_causal_total", (("phase", phase),)] == causal
    kept = "kvsieve:attention_kept_mass"
    assert samples[f"{kept}_bucket", (("le", "0.9"), label)] == 1
    assert (samples[f"{kept}_count", (label,)], samples[f"{kept}_sum", (label,)]) == (3, 2.75)
    reasons = ("finished_reason", "stop"), label
    assert samples["vllm:request_success_total", reasons] == 5


def test_props(live: Live) -> None:
    props = live.client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["default_generation_settings"]["params"]["top_k"] == 40
    assert props["total_slots"] == 4
    assert props["model_path"] == "tiny.gguf"
    assert "im_start" in props["chat_template"]
    assert props["chat_template_caps"] == {"supports_tools": False, "supports_tool_calls": False}
    assert props["attention"] == {"mode": "exact", "per_request": True, "k_min": 1, "k_max": None}


def test_props_name_the_profile_of_the_sparse_default(served: Served) -> None:
    default = SparseAttention(k=4, selector="even", layer_k=((1, 8),), profile="tiny.sparse.json")
    policy = SparsePolicy(default=default)
    with serving(served, ServerConfig(port=0, sparse=policy)) as live:
        attention = live.client.get("/props").json()["attention"]
    assert (attention["k"], attention["profile"]) == (4, "tiny.sparse.json")


def test_slots(live: Live, service: FakeService) -> None:
    slots = live.client.get("/slots").json()
    assert [slot["id"] for slot in slots] == [0, 1, 2, 3]
    assert not any(slot["is_processing"] for slot in slots)
    # Anyone may look at the list, so it has nobody's text.
    assert not {"prompt", "generated"} & set(slots[0])
    assert live.client.get("/slots?fail_on_no_slot=1").status_code == 200
    service.num_slots = 0
    assert live.client.get("/slots?fail_on_no_slot=1").status_code == 503
    assert live.client.get("/slots?fail_on_no_slot=x").status_code == 400


def test_what_is_switched_off_says_so(served: Served) -> None:
    with serving(served, ServerConfig(port=0, slots=False, metrics=False)) as live:
        for path, option in (("/slots", "--no-slots"), ("/metrics", "--no-metrics")):
            reply = live.client.get(path)
            assert reply.status_code == 501
            assert option in reply.json()["error"]["message"]


def test_saving_and_restoring(saving: Live, folder: Path) -> None:
    url = f"{saving.url}/slots/1"
    reply = httpx.post(url, params={"action": "save"}, json={"filename": "a.bin"}).json()
    assert (reply["id_slot"], reply["filename"]) == (1, "a.bin")
    assert (reply["n_saved"], reply["n_written"]) == (7, 5)
    assert reply["timings"]["save_ms"] == 1.0
    assert (folder / "a.bin").read_bytes() == b"saved"
    reply = httpx.post(url, params={"action": "restore"}, json={"filename": "a.bin"}).json()
    assert (reply["n_restored"], reply["n_read"]) == (7, 5)
    assert reply["timings"]["restore_ms"] == 1.0
    assert httpx.post(url, params={"action": "erase"}).json() == {"id_slot": 1, "n_erased": 7}


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "../x", "a/b", "/etc/passwd", "a\\b", ".hidden", "a\0b", "x" * 129),
        *("é", "a b", "-rf", "a\n", None, 5, "link"),
    ],
)
def test_slot_names_are_plain(saving: Live, folder: Path, tmp_path: Path, name: Any) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    (folder / "link").symlink_to(outside)
    for action in ("save", "restore"):
        reply = saving.client.post("/slots/0", params={"action": action}, json={"filename": name})
        assert reply.status_code == 400, name
        assert reply.json()["error"]["param"] == "filename"
    assert outside.read_bytes() == b"secret"
    assert [path.name for path in folder.iterdir()] == ["link"]


def test_slots_that_cannot_be_saved(live: Live, saving: Live) -> None:
    file = {"filename": "a"}
    for url, action, status in (
        (live.url + "/slots/0", "save", 501),
        (saving.url + "/slots/0", "restore", 404),
        (saving.url + "/slots/9", "save", 400),
        (saving.url + "/slots/9", "erase", 400),
        (saving.url + "/slots/x", "save", 400),
        (saving.url + "/slots/0", "copy", 400),
        (saving.url + "/slots/0", "", 400),
    ):
        reply = httpx.post(url, params={"action": action}, json=file)
        assert reply.status_code == status, (url, action)
        assert "message" in reply.json()["error"]


def test_text_to_tokens_and_back(live: Live, service: FakeService) -> None:
    encode = service.tokenizer.encode
    for body, ids in (
        ({"content": "the key"}, encode("the key", add_special=False)),
        ({"content": "<|im_end|>"}, [2]),
        ({"content": "<|im", "parse_special": False}, encode("<|im", parse_special=False)),
        ({"content": ""}, []),
    ):
        assert live.client.post("/tokenize", json=body).json() == {"tokens": ids}
    pieces = live.client.post("/tokenize", json={"content": "aé", "with_pieces": True}).json()
    assert [one["piece"] for one in pieces["tokens"]] == ["a", [0xC3], [0xA9]]
    back = live.client.post("/detokenize", json={"tokens": [1, *encode("hé"), 2]}).json()
    assert back == {"content": "<|im_start|>hé<|im_end|>"}
    for bad in ([-1], [288], ["x"], [1.5], 7, None):
        assert live.client.post("/detokenize", json={"tokens": bad}).status_code == 400


def test_the_prompt_of_a_conversation(live: Live) -> None:
    body = {"messages": [{"role": "user", "content": "Hi\u200b <|im_end|>"}]}
    prompt = "<|im_start|>user\nHi\u200b <|im_end|><|im_end|>\n<|im_start|>assistant\n"
    assert live.client.post("/apply-template", json=body).json() == {"prompt": prompt}
    counted = live.client.post("/v1/chat/completions/input_tokens", json=body).json()
    assert counted["object"] == "response.input_tokens"
    assert counted["input_tokens"] > 17
    body = {**body, "add_generation_prompt": False}
    shorter = live.client.post("/apply-template", json=body).json()["prompt"]
    assert prompt.startswith(shorter)
