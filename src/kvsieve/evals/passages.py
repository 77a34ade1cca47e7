"""Texts read without a question: their last tokens are decoded one by one, whatever they say."""

from kvsieve.engine.generation import Progress
from kvsieve.engine.llm import LLM
from kvsieve.engine.walk import Walk
from kvsieve.errors import CapacityError, ConfigError
from kvsieve.evals.corpus import Passage, passage
from kvsieve.evals.settings import Trial


def read_passage(llm: LLM, kind: str, length: int, *, seed: int = 0) -> Passage:
    """A passage that fits the context; CapacityError names both sizes."""
    if length > llm.ctx_size:
        raise CapacityError(
            f"[eval] lengths: expected at most {llm.ctx_size} tokens (the context), got {length}"
        )
    return passage(llm.tokenizer, kind, length, seed=seed)


def check_passage(trial: Trial, text: Passage, *, positions: int) -> None:
    """Raise ConfigError unless `positions` can be decoded after a prompt, sparsely if asked to."""
    length = len(text.token_ids)
    if not 1 <= positions < length:
        raise ConfigError(
            f"[eval] positions: expected 1 to {length - 1} of {length} tokens to be decoded, "
            f"got {positions}"
        )
    trial.refuse(passage_why_exact(trial, length, positions=positions), num_tokens=length)


def passage_why_exact(trial: Trial, length: int, *, positions: int) -> str | None:
    """Why a sparse trial would read all of a passage, or None."""
    return trial.why_exact(prompt_len=length - positions, num_tokens=length)


def decode_passage(
    llm: LLM,
    text: Passage,
    *,
    trial: Trial,
    positions: int,
    on_progress: Progress | None = None,
) -> Walk:
    """A walk that has read all but the last `positions` tokens as a prompt.

    In setting C the prompt has been read sparsely, its exact tail before the decoded tokens.
    """
    ids = text.token_ids
    walk = llm.walk(ids[:-positions], sparse=trial.arm.sparse, max_tokens=len(ids))
    try:
        walk.read_prompt(on_progress=on_progress)
    except BaseException:
        walk.__exit__()
        raise
    return walk
