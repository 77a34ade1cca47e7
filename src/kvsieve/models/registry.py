"""The architectures there are: a new one is a module with its `Architecture`, and its name here."""

from collections.abc import Mapping
from types import MappingProxyType

from kvsieve.models.architecture import Architecture
from kvsieve.models.gemma3 import GEMMA3
from kvsieve.models.llama import LLAMA, MISTRAL
from kvsieve.models.qwen import QWEN2, QWEN3, QWEN3_VL

_ALL = (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_VL, GEMMA3)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {one.name: one for one in reversed(_ALL)}
)
"""By ``general.architecture`` of a GGUF. What is not here is refused by name."""

MODEL_TYPES: Mapping[str, Architecture] = MappingProxyType(
    {model_type: one for one in _ALL for model_type in one.model_types}
)
"""By ``model_type`` of a checkpoint's ``config.json``, likewise."""
