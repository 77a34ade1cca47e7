import pytest

from kvsieve.kernels.native import NativeBackend, supported_isas

ISAS = [name for name, supported in supported_isas().items() if supported]


@pytest.fixture(scope="package", params=ISAS)
def native(request):
    """The native core on each instruction set of this machine."""
    return NativeBackend(threads=2, isa=request.param)
