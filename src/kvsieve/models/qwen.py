"""Qwen3 as a difference to Llama: each head of queries and keys is normalised before rope."""

from dataclasses import replace
from types import MappingProxyType

from kvsieve.models.llama import LLAMA

QWEN3 = replace(
    LLAMA,
    name="qwen3",
    # The file has the checkpoint's rows as they are: a dimension rotates with one half a head away.
    rope_interleaved=False,
    rope_factors=False,
    head_norms=MappingProxyType({"q_norm": "attn_q_norm", "k_norm": "attn_k_norm"}),
)
