"""A way of running attention, as the user spells it: ``exact``, ``sparse:k=16,selector=even``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvsieve.attention.config import SparseAttention
from kvsieve.errors import ConfigError


def _read_layers(text: str) -> tuple[int, ...]:
    return tuple(int(layer) for layer in text.split("+"))


def read_layer_k(text: str, *, separator: str = "+") -> tuple[tuple[int, int], ...]:
    """Read ``3:64+7:64``: pairs (layer, k). ValueError: anything else."""
    pairs = [pair.split(":") for pair in text.split(separator)]
    return tuple((int(layer), int(k)) for layer, k in pairs)


def _spelled(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return "+".join(":".join(map(str, v)) if isinstance(v, tuple) else str(v) for v in value)


_KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "k": ("k", int),
    "block": ("block_size", int),
    "probe": ("num_probes", int),
    "selector": ("selector", str),
    "share": ("share", str),
    "phase": ("phase", str),
    "tail": ("dense_tail", int),
    "mass": ("mass", float),
    "kmin": ("k_min", int),
    "kmax": ("k_max", int),
    "exact": ("exact_layers", _read_layers),
    "layerk": ("layer_k", read_layer_k),
    "first": ("first_layer", int),
    "seed": ("seed", int),
}
"""Key of the spelling -> field of SparseAttention, and how its value is read."""

KEYS = tuple(_KEYS)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """A named attention setting; `sparse` is None for exact attention."""

    label: str
    sparse: SparseAttention | None

    @classmethod
    def parse(cls, text: str) -> "Arm":
        """Read ``exact`` or ``sparse[:key=value,...]``; raises ConfigError naming the bad part.

        Keys: `KEYS`; of ``exact`` layers joined by +, of ``layerk`` layer:k joined by +. The text
        itself becomes the label.
        """
        mode, colon, settings = text.partition(":")
        if mode == "exact" and not colon:
            return cls(label=text, sparse=None)
        if mode != "sparse" or (colon and not settings):
            raise ConfigError(
                f"--attn: expected exact or sparse[:key=value,...] (for example sparse:k=16), "
                f"got {text!r}"
            )
        fields: dict[str, Any] = {}
        for setting in settings.split(",") if settings else ():
            name, value = _read_setting(setting)
            if name in fields:
                raise ConfigError(f"--attn: expected each key once, got {text!r}")
            fields[name] = value
        return cls(label=text, sparse=SparseAttention(**fields))

    @classmethod
    def of(cls, sparse: SparseAttention | None) -> "Arm":
        """Spell a setting: keys that differ from the defaults, and always k and the selector."""
        if sparse is None:
            return cls(label="exact", sparse=None)
        default = SparseAttention()
        settings = ",".join(
            f"{key}={_spelled(getattr(sparse, field))}"
            for key, (field, _) in _KEYS.items()
            if key in ("k", "selector") or getattr(sparse, field) != getattr(default, field)
        )
        return cls(label=f"sparse:{settings}", sparse=sparse)


def parse_arms(texts: Sequence[str]) -> list[Arm]:
    """Read every ``--attn``; one given twice is refused, for its rows could not be told apart."""
    if len(set(texts)) != len(texts):
        raise ConfigError(f"--attn: expected different settings, got {', '.join(texts)}")
    return [Arm.parse(text) for text in texts]


def _read_setting(setting: str) -> tuple[str, Any]:
    key, equals, value = setting.partition("=")
    if not equals or key not in _KEYS:
        raise ConfigError(
            f"--attn: expected key=value with key in {', '.join(KEYS)}, got {setting!r}"
        )
    field, read = _KEYS[key]
    try:
        return field, read(value)
    except ValueError:
        raise ConfigError(f"--attn: expected a number for {key}, got {value!r}") from None
