import pytest

from kvsieve.errors import CapacityError, KvsieveError, QueueFullError


def test_a_full_queue_says_when_to_come_back():
    with pytest.raises(CapacityError, match="full") as raised:
        raise QueueFullError("[Service.submit] full", retry_after_s=2.5)
    assert isinstance(raised.value, KvsieveError)
    assert raised.value.retry_after_s == 2.5
