"""Speed of kvsieve beside other CPU engines, on the same file, in alternating rounds of one run.

    python benchmarks/compare_peers.py --depths 512,4096 --rounds 3 --out report/peers

Engines, by the words of --arms:

    exact, sparse            kvsieve, q8_0 cache; sparse: k=32, even, shared by group
    llama-f16, llama-q8_0    llama.cpp, if `llama-cpp-python` is installed
    ov                       OpenVINO GenAI, if `openvino-genai` is installed
    ov-xattention, ov-trishape    ... with its sparse attention
    ik-q8_0, ik-f16          ik_llama.cpp, by --ik-bin PATH of its llama-bench

An engine that is missing or fails is left out, with a line that says why. One that answers a pass
key wrongly is marked, and no ratio is against it. Other work on the machine disturbs all sides.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from kvsieve import LLM
from kvsieve.engine.model_loader import resolve_model
from kvsieve.errors import ConfigError, KvsieveError
from kvsieve.evals.corpus import PasskeyPrompt, filler_tokens, passkey_prompt
from kvsieve.models.gguf import GgufFile
from peers.arms import Prompt
from peers.choose import ALL_ARMS, DEFAULT_ARMS, Setup, build_arms
from peers.figures import Comparison, Engine, ratios
from peers.machine import machine
from peers.plot import write_plot
from peers.report import to_json, to_markdown
from peers.rounds import WARM_UP_TOKENS, Rounds, minutes, say

DECODE_TOKENS = 32
PASSKEY_PLACES = (0.1, 0.5, 0.9)


def numbers(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})


def names(text: str) -> list[str]:
    wanted = text.split(",")
    if unknown := set(wanted) - set(ALL_ARMS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(ALL_ARMS)}, got {unknown}")
    return wanted


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-m", "--model", default="smollm2", help="the word smollm2, or a GGUF file")
    parser.add_argument("-t", "--threads", type=int, default=2, help="threads of every engine")
    parser.add_argument("--depths", type=numbers, default=[512, 2048, 4096, 8000])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", type=names, default=list(DEFAULT_ARMS))
    parser.add_argument("--base", help="ratios against this engine, not the best peer per depth")
    parser.add_argument("--passkey", type=int, default=6000, help="tokens to ask in; 0: don't ask")
    parser.add_argument("--out", type=Path, help="folder for report.md, results.json, speed.png")
    parser.add_argument("--ik-bin", type=Path, help="llama-bench of ik_llama.cpp")
    parser.add_argument("--llama-python", default=sys.executable, help="interpreter with llama_cpp")
    parser.add_argument(
        "--openvino-python", default=sys.executable, help="interpreter with openvino_genai"
    )
    parser.add_argument("--openvino-batch", type=int, default=1024, help="its tokens per step")
    return parser.parse_args()


def has_vocabulary(model: Path) -> bool:
    with GgufFile.open(model) as file:
        return bool(file.metadata.get("tokenizer.ggml.model", "no_vocab") != "no_vocab")


def make_prompts(llm: LLM, depths: Sequence[int], *, vocabulary: bool) -> dict[int, Prompt]:
    """Filler text of so many tokens, or random tokens where there are no words."""
    prompts = {}
    for depth in depths:
        if vocabulary:
            token_ids = filler_tokens(llm.tokenizer, depth)
            text = llm.tokenizer.decode(token_ids)
            prompts[depth] = Prompt(token_ids=token_ids, text=text)
        else:
            random = np.random.default_rng(depth).integers(0, llm.config.vocab_size, depth)
            prompts[depth] = Prompt(token_ids=random.tolist(), text=None)
    return prompts


def make_questions(llm: LLM, length: int) -> list[PasskeyPrompt]:
    return [
        passkey_prompt(llm.tokenizer, length=length, depth=place, seed=i)
        for i, place in enumerate(PASSKEY_PLACES)
    ]


def compare(args: argparse.Namespace, llm: LLM, setup: Setup) -> Comparison:
    facts = machine(isa=llm.info.isa, threads=args.threads)
    rounds = Rounds([], decode_tokens=DECODE_TOKENS)
    with ExitStack() as stack:
        rounds.arms = build_arms(args.arms, setup, rounds.leave_out)
        for arm in rounds.arms:
            stack.callback(arm.close)
        warm_up = make_prompts(llm, [WARM_UP_TOKENS], vocabulary=setup.vocabulary)
        rounds.warm_up(warm_up[WARM_UP_TOKENS])
        questions = make_questions(llm, args.passkey) if args.passkey and setup.vocabulary else []
        asked = [len(question.token_ids) for question in questions]
        seconds = args.rounds * rounds.estimate(args.depths) + rounds.estimate(asked)
        say(f"about {minutes(seconds)} in all, by how fast a short prompt went")
        answers = rounds.ask_all(questions)
        prompts = make_prompts(llm, args.depths, vocabulary=setup.vocabulary)
        speeds = rounds.time_all(prompts, args.rounds)
        engines = [
            Engine(name=arm.name, version=arm.version, is_peer=arm.is_peer) for arm in rounds.arms
        ]
    return Comparison(
        machine=facts,
        settings={
            "model": Path(setup.model).name,
            "threads": str(args.threads),
            "rounds": str(args.rounds),
            "decoded tokens per run": str(DECODE_TOKENS),
        },
        engines=engines,
        speeds=speeds,
        answers=answers,
        left_out=rounds.left_out,
    )


def write(comparison: Comparison, *, base: str | None, out: Path | None) -> None:
    rows = ratios(comparison, base=base)
    markdown = to_markdown(comparison, rows)
    print(markdown)
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.md").write_text(markdown, encoding="utf-8")
    (out / "results.json").write_text(to_json(comparison, rows), encoding="utf-8")
    try:
        write_plot(comparison, out / "speed.png")
    except ConfigError as error:
        say(f"no plot: {error}")


def main() -> None:
    args = arguments()
    try:
        model = resolve_model(args.model)
        longest = max([*args.depths, args.passkey, WARM_UP_TOKENS])
        llm = LLM(model, threads=args.threads, ctx_size=longest + DECODE_TOKENS + 1)
    except KvsieveError as error:
        sys.exit(f"compare_peers.py: error: {error}")
    with llm:
        setup = Setup(
            llm=llm,
            model=model,
            vocabulary=has_vocabulary(model),
            threads=args.threads,
            llama_python=args.llama_python,
            openvino_python=args.openvino_python,
            openvino_batch=args.openvino_batch,
            ik_bin=args.ik_bin,
        )
        write(compare(args, llm, setup), base=args.base, out=args.out)


if __name__ == "__main__":
    main()
