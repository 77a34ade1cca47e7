"""What distinguishes one architecture from another in a file: a value, not code."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """An architecture, its tensors by the field of `LayerWeights` that each one fills.

    ``matrices``, ``hidden_norms`` (one value per dimension of the hidden state) and ``head_norms``
    (one per dimension of a head) give names in the file, without ``blk.N.`` and ``.weight``.
    """

    name: str
    """As ``general.architecture`` has it; also the prefix of its keys."""
    rope_interleaved: bool
    """True: rope rotates pairs (2i, 2i+1); False: (i, i + rope_dim/2)."""
    rope_factors: bool
    """Whether a file may divide the frequencies of rope (``rope_freqs.weight``)."""
    matrices: Mapping[str, str]
    hidden_norms: Mapping[str, str]
    head_norms: Mapping[str, str]
