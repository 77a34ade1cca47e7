"""Questions asked of a model: was the answer found, how probable was it, and what was read?"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kvsieve.engine.generation import Progress
from kvsieve.engine.llm import LLM
from kvsieve.engine.outputs import AttentionReport
from kvsieve.engine.walk import Walk
from kvsieve.errors import ConfigError
from kvsieve.evals.passkey import check_room
from kvsieve.evals.settings import Trial
from kvsieve.evals.tasks import MAKERS, TaskPrompt
from kvsieve.types import F32, F64


@dataclass(frozen=True, kw_only=True)
class AnswerRow:
    """One question asked in one attention setting.

    ``length`` is the prompt's length asked for, ``prompt_tokens`` what it came to. ``answer`` is
    the reply on one line, ``score`` the share of the answer that it has right, ``hit``: all of
    it. ``logprob`` is the mean log-probability of the right answer's tokens: it tells two arms
    apart where a small model fails in both, as ``top1`` does, the share of these tokens that were
    the most likely ones. ``mode`` is what ran; ``density`` = blocks read / causal blocks, prompt
    and reply together; ``blocks_read`` counts (query token, block) pairs, once per KV head, over
    all layers.
    """

    task: str
    attn: str
    setting: str
    length: int
    prompt_tokens: int
    depth: float
    seed: int
    expected: str
    answer: str
    hit: bool
    score: float
    logprob: float
    top1: float
    mode: str
    density: float | None
    blocks_read: int


def overall_density(report: AttentionReport) -> float | None:
    """Blocks read / causal blocks over prefill and decode together."""
    causal = report.prefill.causal + report.decode.causal
    return report.blocks_read / causal if causal else None


def log_softmax(logits: F32) -> F64:
    """Log-probabilities in float64, over the last axis."""
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return np.asarray(wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True)))


def make_prompt(llm: LLM, *, task: str, length: int, depth: float, seed: int) -> TaskPrompt:
    """The question; ConfigError for an unknown task, CapacityError if it and a reply do not fit."""
    if task not in MAKERS:
        raise ConfigError(f"[eval] task: expected one of {', '.join(MAKERS)}, got {task!r}")
    prompt = MAKERS[task](llm.tokenizer, length=length, depth=depth, seed=seed)
    check_room(llm, task=task, length=length, reply_tokens=_reply_tokens(llm, prompt))
    return prompt


def run_answers(
    llm: LLM,
    *,
    task: str,
    trials: Sequence[Trial],
    lengths: Sequence[int],
    depths: Sequence[float],
    seeds: Sequence[int] = (0,),
    skip_exact: bool = False,
    on_run: Callable[[str], None] | None = None,
    on_progress: Progress | None = None,
) -> Iterator[AnswerRow]:
    """Ask every length x depth x seed in every trial; a row as soon as it is known.

    The trials of one question see the same prompt. `on_run` hears what starts, `on_progress` how
    far each prompt is. Raises ConfigError or CapacityError before the first run if some prompt
    cannot be made or some sparse trial would stay exact; with `skip_exact` such a trial is left
    out of that prompt.
    """
    if not (trials and lengths and depths and seeds):
        raise ConfigError(
            f"[{task}] expected at least one attention setting, length, depth and seed, got none"
        )
    prompts = [
        (length, seed, make_prompt(llm, task=task, length=length, depth=depth, seed=seed))
        for length in lengths
        for depth in depths
        for seed in seeds
    ]
    if skip_exact:
        runs = [[one for one in trials if not why_exact(one, prompt)] for _, _, prompt in prompts]
    else:
        runs = [[check_prompt(one, prompt) for one in trials] for _, _, prompt in prompts]
    for (length, seed, prompt), asked in zip(prompts, runs, strict=True):
        for trial in asked:
            if on_run is not None:
                on_run(f"{length} tokens, depth {prompt.depth:g}, {trial.name}")
            yield ask(llm, prompt, trial=trial, length=length, seed=seed, on_progress=on_progress)


def why_exact(trial: Trial, prompt: TaskPrompt) -> str | None:
    """Why a sparse trial would read all of this prompt, or None."""
    num_tokens = len(prompt.token_ids)
    prompt_len = trial.prompt_len(num_tokens, prompt.context_tokens)
    return trial.why_exact(prompt_len=prompt_len, num_tokens=num_tokens + 1)


def check_prompt(trial: Trial, prompt: TaskPrompt) -> Trial:
    """The trial; ConfigError if it is a sparse one that would read all of this prompt."""
    trial.refuse(why_exact(trial, prompt), num_tokens=len(prompt.token_ids))
    return trial


def ask(
    llm: LLM,
    prompt: TaskPrompt,
    *,
    trial: Trial,
    length: int,
    seed: int,
    on_progress: Progress | None = None,
) -> AnswerRow:
    """Answer one question greedily, then score the right answer from the same place."""
    ids = prompt.token_ids
    prompt_len = trial.prompt_len(len(ids), prompt.context_tokens)
    max_tokens = len(ids) + _reply_tokens(llm, prompt)
    with llm.walk(ids[:prompt_len], sparse=trial.arm.sparse, max_tokens=max_tokens) as walk:
        logits = walk.read_prompt(on_progress=on_progress)
        for token in ids[prompt_len:]:
            logits = walk.step(token)
        answer = _greedy(llm, walk, logits, prompt.reply_tokens)
        walk.rewind(len(ids))
        logprob, top1 = _score_right_answer(walk, logits, _answer_ids(llm, prompt))
        report = walk.report
    trial.check_sparse(report)
    score = prompt.score(answer)
    return AnswerRow(
        task=prompt.task,
        attn=trial.arm.label,
        setting=trial.setting,
        length=length,
        prompt_tokens=len(ids),
        depth=prompt.depth,
        seed=seed,
        expected=prompt.expected,
        answer=" ".join(answer.split()),
        hit=score == 1.0,
        score=round(score, 4),
        logprob=round(logprob, 6),
        top1=round(top1, 4),
        mode=report.mode,
        density=overall_density(report),
        blocks_read=report.blocks_read,
    )


def _greedy(llm: LLM, walk: Walk, logits: F32, count: int) -> str:
    reply: list[int] = []
    for _ in range(count):
        token = int(logits.argmax())
        if token in llm.tokenizer.eos_ids:
            break
        reply.append(token)
        logits = walk.step(token)
    return llm.tokenizer.decode(reply)


def _score_right_answer(walk: Walk, logits: F32, answer_ids: Sequence[int]) -> tuple[float, float]:
    """Mean log-probability of the tokens, and the share of them that were the most likely ones.

    All of them are decoded, the last one too.
    """
    total, best = 0.0, 0
    for token in answer_ids:
        total += float(log_softmax(logits)[token])
        best += int(logits.argmax()) == token
        logits = walk.step(token)
    return total / len(answer_ids), best / len(answer_ids)


def _answer_ids(llm: LLM, prompt: TaskPrompt) -> list[int]:
    return llm.tokenizer.encode(" " + prompt.expected, add_special=False)


def _reply_tokens(llm: LLM, prompt: TaskPrompt) -> int:
    return max(prompt.reply_tokens, len(_answer_ids(llm, prompt)))
