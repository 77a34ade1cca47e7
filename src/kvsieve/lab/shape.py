"""The sizes of a model that the cost of its attention depends on."""

from dataclasses import dataclass

from kvsieve.errors import ConfigError
from kvsieve.kernels.layout import PageLayout
from kvsieve.models.config import ModelConfig
from kvsieve.types import BLOCK_SIZE, CACHE_TYPES, CacheType

COUNTED_TYPES = (*CACHE_TYPES, "bf16")
"""Cache types whose bytes can be counted. Nothing here runs bf16, which is as large as f16."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Heads, layers and cache types; one KV head, one query head and one layer by default.

    ``num_layers`` are those that read all tokens or blocks that are chosen, ``num_window_layers``
    further ones that read a window whatever is asked for: they are named and not counted.
    """

    head_dim: int
    num_q_heads: int = 1
    num_kv_heads: int = 1
    num_layers: int = 1
    k_type: str = "q8_0"
    v_type: str = "q8_0"
    num_window_layers: int = 0

    def __post_init__(self) -> None:
        for name in ("head_dim", "num_q_heads", "num_kv_heads", "num_layers"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"[ModelShape] {name}: expected 1 or more, got {value!r}")
        if self.num_q_heads % self.num_kv_heads:
            raise ConfigError(
                f"[ModelShape] num_q_heads: expected a multiple of "
                f"num_kv_heads={self.num_kv_heads}, got {self.num_q_heads}"
            )
        for name in ("k_type", "v_type"):
            if getattr(self, name) not in COUNTED_TYPES:
                raise ConfigError(
                    f"[ModelShape] {name}: expected one of {', '.join(COUNTED_TYPES)}, "
                    f"got {getattr(self, name)!r}"
                )
        _ = self.layout  # a head_dim that pages cannot hold is refused here

    @classmethod
    def from_config(cls, config: ModelConfig, *, k_type: str, v_type: str) -> "ModelShape":
        """The shape of a model file; ConfigError if all of its layers read a window."""
        full = len(config.full_layers)
        if not full:
            raise ConfigError(
                f"[ModelShape] {config.name}: expected a layer that reads all tokens, got "
                f"{config.num_layers} that read a window of {max(config.windows)}"
            )
        return cls(
            head_dim=config.head_dim,
            num_q_heads=config.num_q_heads,
            num_kv_heads=config.num_kv_heads,
            num_layers=full,
            num_window_layers=config.num_layers - full,
            k_type=k_type,
            v_type=v_type,
        )

    @property
    def group_size(self) -> int:
        """Query heads that read one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def layout(self) -> PageLayout:
        """The pages of the cache; those of f16 stand for bf16."""
        return PageLayout(
            k_type=_stored(self.k_type), v_type=_stored(self.v_type), head_dim=self.head_dim
        )

    @property
    def head_bytes_per_token(self) -> int:
        """Bytes of one token's key and value in one KV head, scales included."""
        return self.layout.page_bytes // BLOCK_SIZE

    @property
    def layer_bytes_per_token(self) -> int:
        """Bytes of one token in one layer: ``Hkv * head_bytes_per_token``.

        8 KV heads of 128 in q8_0: ``8 * (2 * 128 + 2 * 4) = 2,112``.
        """
        return self.num_kv_heads * self.head_bytes_per_token


def _stored(cache_type: str) -> CacheType:
    return "f16" if cache_type == "bf16" else cache_type  # type: ignore[return-value]
