"""Recall of a five-digit key hidden in filler: does the model still find it, and what was read?"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvsieve.engine.generation import Progress
from kvsieve.engine.llm import LLM
from kvsieve.engine.outputs import AttentionReport, Completion
from kvsieve.engine.sampling import SamplingParams
from kvsieve.errors import CapacityError, ConfigError
from kvsieve.evals.arms import Arm
from kvsieve.evals.corpus import PasskeyPrompt, passkey_prompt

ANSWER_TOKENS = 12
"""Enough for a key of five digits, a token each, and a few words that show what came after."""


@dataclass(frozen=True, kw_only=True)
class PasskeyRow:
    """One question asked in one attention setting.

    ``length`` is the prompt's length asked for, ``prompt_tokens`` what it came to. ``answer`` is
    the reply on one line; ``hit``: the first number in it is the key. ``mode`` is what ran;
    ``density`` = blocks read / causal blocks, prompt and reply together; ``blocks_read`` counts
    (query token, block) pairs, once per KV head, over all layers.
    """

    attn: str
    length: int
    prompt_tokens: int
    depth: float
    key: str
    answer: str
    hit: bool
    mode: str
    density: float | None
    blocks_read: int
    exact_because: str | None


def is_hit(reply: str, key: str) -> bool:
    """Whether the first number of the reply is the key, whole."""
    number = re.search(r"[0-9]+", reply)
    return number is not None and number.group() == key


def overall_density(report: AttentionReport) -> float | None:
    """Blocks read / causal blocks over prefill and decode together."""
    causal = report.prefill.causal + report.decode.causal
    return report.blocks_read / causal if causal else None


def check_room(llm: LLM, *, lengths: Sequence[int], reply_tokens: int) -> None:
    """Raise CapacityError, before anything runs, unless the longest prompt and its reply fit."""
    if max(lengths) + reply_tokens > llm.ctx_size:
        raise CapacityError(
            f"[passkey] lengths: expected at most {llm.ctx_size - reply_tokens} tokens beside a "
            f"reply of {reply_tokens} in a context of {llm.ctx_size}, got {max(lengths)}"
        )


def run_passkey(
    llm: LLM,
    *,
    arms: Sequence[Arm],
    lengths: Sequence[int],
    depths: Sequence[float],
    seed: int = 0,
    max_tokens: int = ANSWER_TOKENS,
    on_run: Callable[[str], None] | None = None,
    on_progress: Progress | None = None,
) -> Iterator[PasskeyRow]:
    """Ask every length x depth x arm; a row as soon as it is known.

    The arms of one length and depth see the same prompt. `on_run` hears what starts,
    `on_progress` how far each prompt is.
    Raises ConfigError or CapacityError before the first run if some prompt cannot be made.
    """
    if not (arms and lengths and depths):
        raise ConfigError("[passkey] expected at least one setting, length and depth, got none")
    check_room(llm, lengths=lengths, reply_tokens=max_tokens)
    prompts = [
        (length, passkey_prompt(llm.tokenizer, length=length, depth=depth, seed=seed))
        for length in lengths
        for depth in depths
    ]
    params = SamplingParams(max_tokens=max_tokens)
    for length, prompt in prompts:
        for arm in arms:
            if on_run is not None:
                on_run(f"{length} tokens, depth {prompt.depth:g}, {arm.label}")
            completion = llm.generate(
                prompt.token_ids, params, sparse=arm.sparse, on_progress=on_progress
            )
            yield _row(completion, prompt, arm=arm, length=length)


def _row(completion: Completion, prompt: PasskeyPrompt, *, arm: Arm, length: int) -> PasskeyRow:
    report = completion.attention
    return PasskeyRow(
        attn=arm.label,
        length=length,
        prompt_tokens=completion.prompt_tokens,
        depth=prompt.depth,
        key=prompt.key,
        answer=" ".join(completion.text.split()),
        hit=is_hit(completion.text, prompt.key),
        mode=report.mode,
        density=overall_density(report),
        blocks_read=report.blocks_read,
        exact_because=report.exact_because,
    )
