"""A small comparison whose medians and ratios can be checked by hand."""

from peers.arms import Speed
from peers.figures import Answer, Comparison, Engine


def speed(prefill_s: float, decode_ms: float, prompt_tokens: int = 1000) -> Speed:
    return Speed(prompt_tokens=prompt_tokens, prefill_s=prefill_s, decode_ms=decode_ms)


def answer(engine: str, hit: bool) -> Answer:
    return Answer(engine=engine, prompt_tokens=990, depth=0.5, key="12345", reply="12345.", hit=hit)


def comparison(**changes) -> Comparison:
    """`quick` reads fastest, but loses the answer; `slow` decodes fastest."""
    values = {
        "machine": {"processor": "a processor"},
        "settings": {"model": "model.gguf", "threads": "2"},
        "engines": [
            Engine(name="ours", version="1", is_peer=False),
            Engine(name="quick", version="2", is_peer=True),
            Engine(name="slow", version="3", is_peer=True),
            Engine(name="timed only", version="4", is_peer=True),
        ],
        "speeds": {
            1000: {
                "ours": [speed(1.0, 10.0), speed(2.0, 20.0), speed(1.0, 10.0)],
                "quick": [speed(0.5, 30.0), speed(0.5, 30.0), speed(0.5, 30.0)],
                "slow": [speed(4.0, 15.0), speed(6.0, 50.0), speed(2.0, 40.0)],
                "timed only": [speed(3.0, 60.0), speed(8.0, 60.0), speed(5.0, 60.0)],
            },
            4000: {"ours": [speed(8.0, 12.0, prompt_tokens=4000)]},
        },
        "answers": [answer("ours", True), answer("quick", False), answer("slow", True)],
        "left_out": ["absent: no such package"],
    }
    return Comparison(**{**values, **changes})
