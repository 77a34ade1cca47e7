"""Backends by name."""

from typing import Literal, get_args

from kvsieve.errors import ConfigError
from kvsieve.kernels.backend import Backend

BackendName = Literal["native", "reference"]


def make_backend(
    name: BackendName, *, threads: int | None = None, isa: str | None = None
) -> Backend:
    """The kernels to run on.

    threads  None: as many as this process has fast cores (`reference` runs on one)
    isa      None: the best instruction set of this processor; else one of `info`'s names

    Raises
    ------
    ConfigError
        An unknown name, or threads or an instruction set that this backend or machine lacks.
    """
    if threads is not None and (type(threads) is not int or threads < 1):
        raise ConfigError(f"[backend] threads: expected at least 1, got {threads!r}")
    if name == "reference":
        if isa is not None:
            raise ConfigError(
                f"[backend] isa: expected none with the reference backend (NumPy), got {isa!r}"
            )
        from kvsieve.kernels.reference.backend import ReferenceBackend

        return ReferenceBackend(threads=threads or 1)
    if name == "native":
        from kvsieve.kernels.native import NativeBackend

        return NativeBackend(threads=threads, isa=isa)
    raise ConfigError(
        f"[backend] backend: expected one of {', '.join(get_args(BackendName))}, got {name!r}"
    )
