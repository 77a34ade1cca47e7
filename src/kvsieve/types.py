"""Shared words: array aliases, the block size, and the legend of dimension names.

Dimensions in docstrings, everywhere in the project:

``T``    rows of a step (query tokens of every sequence in the batch, one after the other)
``Tq``   query tokens of one sequence
``Tkv``  visible tokens of one sequence
``Hq``   query heads; ``Hkv`` key/value heads; query head ``h`` reads KV head ``h // (Hq // Hkv)``
``D``    head_dim
``Nb``   blocks, ``S`` tokens per block (a block of the cache is always 32 tokens)
``W``    hidden size of the model
"""

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

BLOCK_SIZE = 32
"""Tokens per cache block: page of the cache, unit of selection, tile of prefill."""

BLOCKS_PER_RUN = 16
"""Attention reduces over runs of so many listed blocks, each from scratch, merged in order."""

CacheType: TypeAlias = Literal["f32", "f16", "q8_0", "q4_0"]
CACHE_TYPES: tuple[CacheType, ...] = ("f32", "f16", "q8_0", "q4_0")

F32: TypeAlias = NDArray[np.float32]
F64: TypeAlias = NDArray[np.float64]
I8: TypeAlias = NDArray[np.int8]
I32: TypeAlias = NDArray[np.int32]
I64: TypeAlias = NDArray[np.int64]
U8: TypeAlias = NDArray[np.uint8]
Bool: TypeAlias = NDArray[np.bool_]
AnyArray: TypeAlias = NDArray[Any]
