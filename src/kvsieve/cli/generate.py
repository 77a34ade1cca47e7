"""``kvsieve generate``: a prompt in, the model's continuation out, as it comes."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

from kvsieve.cli.groups import grouped
from kvsieve.cli.loading import open_model
from kvsieve.cli.options import ModelOptions, SamplingOptions, option
from kvsieve.cli.profiles import profiled
from kvsieve.cli.progress import StatusBar
from kvsieve.cli.reply_options import ReplyOptions
from kvsieve.cli.sparse_options import SparseOptions
from kvsieve.errors import ConfigError

if TYPE_CHECKING:
    from kvsieve.attention.config import SparseAttention
    from kvsieve.engine.llm import LLM
    from kvsieve.engine.outputs import Completion
    from kvsieve.engine.sampling import SamplingParams

_PROMPT = "Prompt and output"

NO_LIMIT = 2**31 - 1
"""``-n -1``: the engine ends a reply where the context is full, whatever it was asked for."""


@dataclass(frozen=True, kw_only=True)
class PromptOptions:
    """Where the prompt comes from, and what is shown of the result."""

    prompt: Annotated[
        str | None,
        option("-p", "--prompt", panel=_PROMPT, metavar="TEXT", help="The prompt."),
    ] = None
    file: Annotated[
        str | None,
        option(
            "-f",
            "--file",
            panel=_PROMPT,
            metavar="FILE",
            help="Read the prompt from a file, - for stdin; one line break at its end is dropped.",
        ),
    ] = None
    chat: Annotated[
        bool,
        option("--chat", panel=_PROMPT, help="Put the prompt into the model's chat template."),
    ] = False
    as_json: Annotated[
        bool,
        option(
            "--json",
            panel=_PROMPT,
            help="Print one JSON object at the end: text, token ids, times, what attention read.",
        ),
    ] = False
    profile: Annotated[
        bool,
        option(
            "--profile",
            panel=_PROMPT,
            help="Say on stderr where the time went: the prompt, and every decoded token.",
        ),
    ] = False

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.file is None):
            got = "none" if self.prompt is None else "both"
            raise ConfigError(
                f"prompt: expected one of -p TEXT and -f FILE (- for stdin), got {got}"
            )

    def read(self) -> str:
        """The prompt's text."""
        if self.file is None:
            return self.prompt or ""
        data = sys.stdin.buffer.read() if self.file == "-" else Path(self.file).read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"-f/--file: expected UTF-8 text, got byte 0x{data[error.start]:02x} "
                f"at offset {error.start} of {self.file}"
            ) from None
        return text.removesuffix("\n").removesuffix("\r")


@grouped
def generate(
    *,
    prompt: PromptOptions,
    sampling: SamplingOptions,
    reply: ReplyOptions,
    sparse: SparseOptions,
    model: ModelOptions,
) -> None:
    """Continue a prompt, exactly or reading only the best blocks of the cache.

    The text goes to stdout as it comes; one line about the run goes to stderr.
    Exit code: 0, 2 for a bad option, file or prompt, 130 after Ctrl-C.

    \b
    Examples:
      kvsieve generate -p "The capital of France is" -n 16
      kvsieve generate -f report.txt -n 200 --sparse-attn --sparse-k 16
      cat notes.txt | kvsieve generate --chat -f - --json
      kvsieve generate --chat -p "Two cities, as JSON" -j '{"type": "array"}'
      kvsieve generate -m model.gguf --kv-q4 -p "Once" --temp 0.8 -s 7
    """
    text = prompt.read()
    params = sampling_params(sampling, reply)
    with StatusBar() as bar, open_model(model, bar=bar) as llm:
        bar.close()
        setting = profiled(sparse.setting, options=sparse, llm=llm, model=model)
        ids = llm.chat_prompt([{"role": "user", "content": text}]) if prompt.chat else None
        completion = _run(
            llm,
            text if ids is None else ids,
            params,
            sparse=setting,
            bar=bar,
            quiet=prompt.as_json,
        )
    if prompt.as_json:
        print(json.dumps(completion.to_json(), ensure_ascii=False, indent=2))
    else:
        print(summary(completion, sampled=sampling.temp > 0), file=sys.stderr)
    if completion.attention.warning is not None and not prompt.as_json:
        print(f"kvsieve: {completion.attention.warning}", file=sys.stderr)
    if prompt.profile:
        print("\n".join(profile_lines(completion)), file=sys.stderr)


def sampling_params(
    options: SamplingOptions, reply: ReplyOptions | None = None
) -> "SamplingParams":
    """The engine's parameters; ConfigError on a value out of range."""
    from kvsieve.engine.sampling import SamplingParams

    reply = ReplyOptions() if reply is None else reply
    return SamplingParams(
        temperature=options.temp,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=None if options.seed == -1 else options.seed,
        max_tokens=NO_LIMIT if options.predict == -1 else options.predict,
        stop=options.stop,
        ignore_eos=options.ignore_eos,
        repeat_penalty=reply.repeat_penalty,
        repeat_last_n=reply.repeat_last_n,
        presence_penalty=reply.presence_penalty,
        frequency_penalty=reply.frequency_penalty,
        constraint=reply.constraint,
    )


def _run(
    llm: "LLM",
    prompt: str | Sequence[int],
    params: "SamplingParams",
    *,
    sparse: "SparseAttention | None",
    bar: StatusBar,
    quiet: bool,
) -> "Completion":
    """Print the text as it comes, unless `quiet`; a line that was begun is always ended."""
    bar.begin("reading the prompt")
    events = llm.stream(prompt, params, sparse=sparse, on_progress=bar.advance)
    line_begun = False
    try:
        for event in events:
            bar.close()
            if event.text and not quiet:
                line_begun = True
                sys.stdout.write(event.text)
                sys.stdout.flush()
            if event.completion is not None:
                return event.completion
    finally:
        bar.close()
        if line_begun:
            sys.stdout.write("\n")
            sys.stdout.flush()
    raise RuntimeError("a stream ended without its completion")


def summary(completion: "Completion", *, sampled: bool = False) -> str:
    """One line: which attention ran, how fast, why it ended, and the seed if tokens were drawn."""
    seed = f" | seed {completion.seed}" if sampled else ""
    report, timings = completion.attention, completion.timings
    if report.mode == "sparse":
        shares = {"prompt": report.prefill.density, "reply": report.decode.density}
        read = ", ".join(f"{n} {d:.2f}" for n, d in shares.items() if d is not None)
        kept = "" if report.kept_mass is None else f"; kept mass about {report.kept_mass.mean:.3f}"
        budget = f"k={report.k}" if report.mass is None else f"mass={report.mass:g}"
        attention = f"sparse {report.selector} {budget} (density: {read}{kept})"
    elif report.exact_because is not None:
        attention = f"asked for sparse, ran exactly: {report.exact_because}"
    else:
        attention = "exact"
    reply = f"reply {timings.predicted_n:,} tokens"
    if completion.tokens:
        per_token = fmean(step.total_ms for step in completion.tokens)
        reply += f", {per_token:.2f} ms each ({1e3 / per_token:,.0f}/s)"
    return (
        f"[{attention} | prompt {timings.prompt_n:,} tokens in {timings.prompt_ms / 1e3:.2f} s "
        f"({timings.prompt_per_second:,.0f}/s) | {reply} | {completion.finish_reason}{seed}]"
    )


def profile_lines(completion: "Completion") -> list[str]:
    """The original system's timing lines: one for the prompt, one per decode step."""
    timings = completion.timings
    share = 100.0 / timings.prompt_ms if timings.prompt_ms > 0 else 0.0
    lines = [
        f"[PREFILL-TIMING] n={timings.prompt_n} total={timings.prompt_ms:.2f}ms "
        f"gemm={timings.prompt_dense_ms * share:.1f}% "
        f"attn={timings.prompt_attention_ms * share:.1f}% "
        f"select={timings.prompt_select_ms * share:.1f}%"
    ]
    lines += [
        f"[DEC-SINGLE] n={step.num_tokens} total={step.total_ms:.3f}ms "
        f"attn={step.attention_ms:.3f}ms select={step.select_ms:.3f}ms gemm={step.dense_ms:.3f}ms"
        for step in completion.tokens
    ]
    return lines
