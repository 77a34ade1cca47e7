"""Numbers as people read them."""


def shown_count(count: int) -> str:
    """All digits up to ten billion, then three: ``16,777,216``, ``7.7 T``."""
    if count < 10**10:
        return f"{count:,}"
    for power, letter in ((15, "P"), (12, "T"), (9, "G")):
        if count >= 10**power:
            return f"{count / 10**power:.3g} {letter}"
    return f"{count:,}"


def shown_bytes(num_bytes: int) -> str:
    """In the largest binary unit that leaves at least 1: ``512 KiB``, ``57.8 MiB``."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >= 1 << power:
            value = num_bytes / (1 << power)
            return f"{value:.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
    return f"{num_bytes:,} B"


def shown_ratio(exact: float, sparse: float) -> str:
    """How many times less, or ``-`` where there is nothing to compare."""
    if exact <= 0 or sparse <= 0:
        return "-"
    ratio = exact / sparse
    return f"{ratio:.2f}x" if ratio < 100 else f"{ratio:,.0f}x"
