import pytest

from kvsieve.engine.llm import LLM
from kvsieve.errors import CapacityError
from kvsieve.evals.passkey import check_room, is_hit


@pytest.mark.parametrize(
    ("reply", "hit"),
    [
        (" 71432. Remember", True),
        ("71432", True),
        (" the key: 71432!", True),
        (" 714321", False),
        (" 7143", False),
        (" 1. 71432", False),
        (" 71 432", False),
        ("", False),
    ],
)
def test_hit_means_that_the_first_number_is_the_key(reply: str, hit: bool) -> None:
    assert is_hit(reply, "71432") is hit


def test_a_prompt_and_its_reply_may_fill_the_context_and_no_more(llm: LLM) -> None:
    check_room(llm, task="kv", length=532, reply_tokens=12)
    with pytest.raises(CapacityError, match=r"\[kv\] .*at most 532 tokens .* of 544, got 533"):
        check_room(llm, task="kv", length=533, reply_tokens=12)
