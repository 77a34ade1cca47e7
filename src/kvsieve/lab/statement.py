"""The ledger in words and columns, with its formulas if asked."""

from kvsieve.lab.ledger import BreakEven, Costs, Ledger
from kvsieve.lab.prediction import KernelCost, Measured
from kvsieve.lab.reading import Rule, ScoreCost, first_sparse_tokens, scored_blocks
from kvsieve.lab.shape import ModelShape
from kvsieve.lab.speedup import PartTimes, Rest
from kvsieve.lab.units import shown_bytes, shown_count, shown_ratio

_ROWS = (
    ("pairs per head and layer", "pairs"),
    ("FLOP, attention", "attention_flop"),
    ("FLOP, selection", "selection_flop"),
    ("FLOP, all", "total_flop"),
    ("bytes, cache", "cache_bytes"),
    ("bytes, index", "index_bytes"),
    ("bytes, selection", "selection_bytes"),
    ("bytes, all", "total_bytes"),
)


def ledger_lines(ledger: Ledger) -> list[str]:
    """What the shape and the rule are, then one token and one prompt, exact beside sparse."""
    n = ledger.n_tokens
    return [
        *_head(ledger.shape, ledger.rule, n),
        "",
        f"One token that sees {n:,}",
        *_table(ledger.exact_token, ledger.rule_token),
        "",
        f"Reading a prompt of {n:,} tokens",
        *_table(ledger.exact_prompt, ledger.rule_prompt),
    ]


def break_even_lines(found: BreakEven) -> list[str]:
    """From which context on the rule costs less."""
    return [
        "Sparse costs less from this context on",
        f"  a token, bytes      {_context(found.token_bytes_at_tokens)}",
        f"  a token, FLOP       {_context(found.token_flop_at_tokens)}",
        f"  a prompt, FLOP      {_context(found.prompt_flop_at_tokens)}",
    ]


def part_lines(times: PartTimes) -> list[str]:
    """The speed-ups, and what to attack first."""
    before, after = times.attention_ms, times.replacement_ms
    ratio, whole = times.attention_speedup_ratio, times.whole_speedup_ratio
    parts = " + ".join(f"{part:g}" for part in times.parts_ms.values())
    verdict = "faster" if ratio > 1 else "slower" if ratio < 1 else "as fast"
    other = times.other_ms
    lines = [
        f"attention   {before:.2f} -> {after:.2f} ms ({parts})   {ratio:.2f}x, {verdict}",
        f"whole       {before + other:.2f} -> {after + other:.2f} ms   {whole:.2f}x",
    ]
    if times.best_whole_ratio is not None:
        lines.append(
            f"at most     {times.best_whole_ratio:.2f}x, if attention took no time: "
            f"{other:g} ms are something else"
        )
    first = times.attack_first
    part = times.parts_ms[first]
    lines.append(
        f"attack      {first} first: {part:.2f} of {after:.2f} ms "
        f"({part / after:.0%}); without it attention would take {after - part:.2f} ms"
    )
    if ratio < 1:
        lines.append(f"to break even, {after - before:.2f} ms must go")
    return lines


def rest_lines(rest: Rest) -> list[str]:
    """Whether a token is a constant and its attention."""
    values = ", ".join(f"{value:.1f}" for value in rest.other_ms)
    constant = rest.spread <= 0.05
    return [
        f"total - attention = {values} ms",
        f"mean {rest.mean_ms:.1f} ms, at most {rest.spread:.1%} away from it: "
        + ("constant, so only attention grows with the context" if constant else "not constant"),
    ]


def explanation_lines(ledger: Ledger) -> list[str]:
    """The formulas behind one token's row and a prompt's, with their numbers."""
    shape, rule, n = ledger.shape, ledger.rule, ledger.n_tokens
    heads = f"{shape.num_q_heads} x {shape.num_layers}"
    lines = [
        "Formulas: n tokens, d head_dim, Hq and Hkv heads, L layers, S tokens per block, k blocks,",
        "N = ceil(n / S) blocks, B bytes of a token in one KV head",
        f"  B = K and V with their scales = {shape.head_bytes_per_token}; "
        f"per layer Hkv B = {shape.layer_bytes_per_token:,}",
        "Exact, a token",
        f"  pairs             n = {n:,}",
        f"  FLOP, attention   4 d Hq L pairs = 4 x {shape.head_dim} x {heads} x {n:,}",
        f"  bytes, cache      n Hkv B L = {shown_count(ledger.exact_token.cache_bytes)}",
        "Exact, a prompt",
        f"  pairs             n (n + 1) / 2 = {ledger.exact_prompt.pairs:,}",
        "  bytes, cache      a tile of 32 queries loads the tokens up to its end once per KV head",
        "Sparse, a token",
        *_rule_formulas(shape, rule, n),
        f"  FLOP, attention   4 d Hq L pairs = 4 x {shape.head_dim} x {heads} x "
        f"{ledger.rule_token.pairs:,}",
    ]
    if rule.sparse is not None:
        lines += [
            "Sparse, a prompt",
            "  pairs             of a tile i: what exact reads, less S for each block left out:",
            "                    rows (own - (k - 1)) S, own = blocks before the tile's; the first",
            f"                    two tiles and the last {rule.sparse.dense_tail} tokens are exact",
            "  selection         each of the tile's rows scores each of the own blocks",
        ]
    return lines


def measured_lines(result: Measured) -> list[str]:
    """Measured beside predicted, and what the prediction was made of."""
    model = result.model
    contexts = ", ".join(f"{time.n_tokens:,}" for time in result.calibration)
    lines = [
        f"One layer, microseconds; calibrated at {contexts} tokens",
        f"  exact attention    {_cost(model.exact)}",
        f"  choosing blocks    {_cost(model.select)}",
        f"  sparse attention   {_cost(model.attend)}",
        "",
        _columns("tokens", "exact", "choose", "sparse", "ratio", "predicted", "off by"),
    ]
    for got, said in zip(result.measured, result.predicted, strict=True):
        off = said.speedup_ratio / got.speedup_ratio - 1
        times = (got.exact.total_us, got.sparse.select_us, got.sparse.attention_us)
        lines.append(
            _columns(
                f"{got.n_tokens:,}",
                *(f"{time:,.0f}" for time in times),
                f"{got.speedup_ratio:.2f}x",
                f"{said.speedup_ratio:.2f}x",
                f"{off:+.0%}",
            )
        )
    unsettled = [t for t in (*result.calibration, *result.measured) if not t.settled]
    if unsettled:
        lines.append(
            "  the machine is busy: the fastest steps do not agree at "
            + ", ".join(f"{time.n_tokens:,}" for time in unsettled)
            + " tokens"
        )
    lines += ["", f"Sparse takes less time from {_context(model.break_even_tokens)} on (predicted)"]
    return lines


def _rule_formulas(shape: ModelShape, rule: Rule, n: int) -> list[str]:
    lines = []
    if rule.window_tokens is not None:
        lines.append(f"  window            min(n, w) = {min(n, rule.window_tokens):,} tokens")
        lines.append("                    in a prompt: n w - w (w - 1) / 2 pairs for n >= w")
    sparse = rule.sparse
    if sparse is None:
        return lines
    if n < first_sparse_tokens(sparse):
        return [*lines, f"  all {-(-n // sparse.block_size)} blocks fit the budget: exact"]
    size, k = sparse.block_size, sparse.k
    blocks = -(-n // size)
    cost = ScoreCost.of(rule, shape)
    coarse, fine = scored_blocks(rule, n_tokens=n)
    keys, load_bytes = cost.of_blocks(coarse, fine)
    lists, each = shape.num_q_heads, "Hq"
    if sparse.sharing == "group":
        lists, each = shape.num_kv_heads, "Hkv"
    lines += [
        f"  pairs, chosen     (k - 1) S + n - S (N - 1) = {k - 1} x {size} + "
        f"{n - size * (blocks - 1)}",
        f"  blocks scored     {_scored_words(coarse, fine, cost)}",
        f"  FLOP, selection   2 dims x keys scored x Hq L = 2 x {cost.dims} x {keys:,} "
        f"x {shape.num_q_heads} x {shape.num_layers}",
        f"  lists of blocks   {each} = {lists}, each loads its own blocks and its own index",
        f"  bytes, index      {each} L x what was scored = {lists} x {shape.num_layers} x "
        f"{load_bytes:,}",
        f"  bytes, selection  4 {each} (2 N + k) L: scores written and read, the list"
        + ("; 8 n L of importance" if sparse.uses_importance and not rule.scan_dims else ""),
    ]
    return lines


def _scored_words(coarse: int, fine: int, cost: ScoreCost) -> str:
    words = f"{fine:,} by {cost.keys} keys ({cost.load_bytes:,} bytes) each"
    if coarse:
        words += f", after all {coarse:,} by {cost.coarse_keys} ({cost.coarse_bytes:,} bytes)"
    return words


def _head(shape: ModelShape, rule: Rule, n: int) -> list[str]:
    layer = shape.layer_bytes_per_token * n
    types = shape.k_type if shape.k_type == shape.v_type else f"{shape.k_type}/{shape.v_type}"
    windows = shape.num_window_layers
    not_counted = f" ({windows} more with a window are not counted)" if windows else ""
    return [
        f"model    {shape.num_layers} layers{not_counted}, {shape.num_q_heads} query heads, "
        f"{shape.num_kv_heads} KV heads of {shape.head_dim}",
        f"cache    {types}: {shape.layer_bytes_per_token:,} bytes per token and layer; at {n:,} "
        f"tokens {layer / 1e6:,.1f} MB per layer, {shown_bytes(layer * shape.num_layers)} in all",
        f"sparse   {_rule_words(rule, n)}",
    ]


def _rule_words(rule: Rule, n: int) -> str:
    words = []
    sparse = rule.sparse
    if sparse is not None:
        what = f"scan of {rule.scan_dims} dimensions" if rule.scan_dims else sparse.selector
        words.append(
            f"{what}, {sparse.k} of {-(-n // sparse.block_size):,} blocks of {sparse.block_size}, "
            f"one choice per {sparse.sharing}"
        )
        if n < first_sparse_tokens(sparse):
            words.append("all fit: exact")
    if rule.window_tokens is not None:
        words.append(f"a window of {rule.window_tokens} tokens")
    return "; ".join(words)


def _table(exact: Costs, sparse: Costs) -> list[str]:
    lines = [f"  {'':<26}{'exact':>16}{'sparse':>16}{'ratio':>10}"]
    for label, name in _ROWS:
        a, b = getattr(exact, name), getattr(sparse, name)
        show = shown_bytes if name.endswith("_bytes") else shown_count
        ratio = shown_ratio(a, b)
        lines.append(f"  {label:<26}{show(a):>16}{show(b):>16}{ratio:>10}")
    return lines


def _context(n_tokens: int | None) -> str:
    return "never" if n_tokens is None else f"{n_tokens:,} tokens"


def _cost(cost: KernelCost) -> str:
    if cost.bytes_per_us == float("inf"):
        return f"{cost.fixed_us:,.1f} (always the same bytes)"
    return f"{cost.fixed_us:,.1f} + bytes at {cost.bytes_per_us / 1e3:,.1f} GB/s"


def _columns(*cells: str) -> str:
    return "  " + "".join(f"{cell:>11}" for cell in cells)
