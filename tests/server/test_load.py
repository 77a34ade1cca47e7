"""Many clients at once on a real model, some of which leave in the middle."""

import random
import threading
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import httpx
import openai
import pytest

from kvsieve.server.config import ServerConfig
from tests.server.conftest import smollm2_served
from tests.server.live import Live, begin, serving, wait_until

CLIENTS, REQUESTS, LEAVERS = 30, 10, 20
SELECTORS = ("even", "probe", "anchors", "window")
MODEL = "SmolLM2-135M-Instruct.Q4_1"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with (
        smollm2_served(max_queue=2 * CLIENTS) as served,
        serving(served, ServerConfig(port=0)) as live,
    ):
        yield live


def body_of(chance: random.Random) -> dict[str, Any]:
    """A request of any kind: short or long, streamed or not, exact or sparse, shared or new."""
    length = chance.choice([1, 20, 40, 100, 300])
    start = chance.choice([1000, 1000, chance.randrange(1000, 40_000)])
    body: dict[str, Any] = {
        "prompt": [start + place for place in range(length)],
        "max_tokens": chance.choice([1, 4, 16]),
        "temperature": chance.choice([0, 0.8]),
        "seed": 5,
        "stream": chance.random() < 0.5,
    }
    if chance.random() < 0.3:
        body["sparse"] = {"k": 3, "selector": chance.choice(SELECTORS)}
    return body


def time_of_a_request(client: openai.OpenAI) -> float:
    prompt = [30_000 + random.randrange(9000) for _ in range(64)]
    began = time.perf_counter()
    client.completions.create(model="m", prompt=prompt, max_tokens=8, temperature=0)
    return time.perf_counter() - began


def run_client(live: Live, number: int, leaves: set[int], problems: list[str]) -> None:
    chance = random.Random(number)
    with httpx.Client(base_url=live.url, timeout=None) as client:
        for request in range(REQUESTS):
            body = body_of(chance)
            if number * REQUESTS + request in leaves:
                connection = begin(live, {**body, "max_tokens": 500})
                time.sleep(chance.random() / 2)
                connection.close()
                continue
            reply = client.post("/v1/completions", json=body)
            if reply.status_code != 200:
                problems.append(f"{reply.status_code}: {reply.text[:200]}")
            elif body["stream"]:
                if "data: [DONE]" not in reply.text or '"error"' in reply.text:
                    problems.append(reply.text[-300:])
            elif reply.json()["usage"]["completion_tokens"] < 1:
                problems.append(reply.text[:300])


def test_thirty_clients_of_which_some_leave(live: Live) -> None:
    """Case SRV-06 at scale: no error, nothing left behind, the next request served as ever."""
    leaves = set(random.Random(7).sample(range(CLIENTS * REQUESTS), LEAVERS))
    problems: list[str] = []
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="x", max_retries=0) as client:
        before = [time_of_a_request(client) for _ in range(5)]
        threads = [
            threading.Thread(target=run_client, args=(live, number, leaves, problems))
            for number in range(CLIENTS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems, problems[:5]
        slots = lambda: live.client.get("/slots").json()  # noqa: E731
        wait_until(lambda: not any(slot["is_processing"] for slot in slots()))
        page = live.client.get("/metrics").text
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert f'vllm:{name}{{model_name="{MODEL}"}} 0.0' in page
        after = [time_of_a_request(client) for _ in range(5)]
    # Printed and not compared: how long a request takes is for a quiet machine to say.
    print(
        f"a request on the idle server: {median(before):.3f} s before, {median(after):.3f} s after"
    )
