import pytest

from kvsieve.errors import ConfigError
from kvsieve.kernels.backends import make_backend


def test_an_unknown_backend_is_named():
    with pytest.raises(ConfigError, match="one of native, reference, got 'cuda'"):
        make_backend("cuda")  # type: ignore[arg-type]


def test_the_reference_backend_has_no_instruction_set_to_choose():
    with pytest.raises(ConfigError, match=r"isa: expected none .* got 'avx2'"):
        make_backend("reference", isa="avx2")


@pytest.mark.parametrize("threads", [0, -2, True])
def test_threads_are_at_least_one(threads: int):
    with pytest.raises(ConfigError, match="threads: expected at least 1"):
        make_backend("reference", threads=threads)
