"""The architectures there are: a new one is a module with its `Architecture`, and its name here."""

from collections.abc import Mapping
from types import MappingProxyType

from kvsieve.models.architecture import Architecture
from kvsieve.models.llama import LLAMA
from kvsieve.models.qwen import QWEN3

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {architecture.name: architecture for architecture in (LLAMA, QWEN3)}
)
"""By ``general.architecture``. What is not here is refused by name."""
