"""Two thousand lines that are hard to cut into tokens, and a vocabulary that merges by score.

Both follow from a seed, with nothing of `random` but `random()`, which no version changes; the
tests make them again, and `benchmarks/golden/make_stress_golden.py` gives them to llama.cpp.
"""

import random
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

LINES = 2000

_TEXT = (
    "the of and to in is that for it was on are as with his they at be this have from or one had "
    "by word but not what all were we when your can said there use an each which she do how their "
    "if Nebukadnezar naïve façade Übergrößen co-operate don't it's they'll I'm HTTPServer "
    "camelCase snake_case 3rd 1,000.5 e.g. U.S.A. whatsoever antidisestablishmentarianism"
)
_WORDS = _TEXT.split()
_CJK = "你好世界天地玄黄宇宙洪荒日月盈昃こんにちは世界カタカナ한국어안녕하세요"
_EMOJI = ["😀", "👍🏽", "👨‍👩‍👧", "🇩🇪", "❤️", "🏳️‍🌈", "1️⃣", "☃"]
_CODE = [
    "def f(x, y=0):",
    "    return x ** 2 + y",
    "for (int i = 0; i < n; i++) {",
    "\t\tx[i] += 1;",
    "}",
    "#include <stdio.h>",
    'printf("%d\\n", a->b);',
    "SELECT * FROM t WHERE a != 'b';",
    '<div class="x">',
    "</div>",
    "if (a && !b || c == d) { ... }",
    "x = {'a': [1, 2, (3,)]}",
    "$ ls -la | grep foo >> out.txt",
]
_SPECIAL = [
    "<s>", "</s>", "<unk>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>", "<|endoftext|>",
    "<start_of_turn>", "<end_of_turn>", "<unused7>", "<|im_start", "im_end|>", "<0x0A>", "[INST]",
]  # fmt: skip
_SCRIPTS = [
    "привет мир",
    "Ελληνικά",
    "שלום עולם",
    "مرحبا بالعالم",
    "हिन्दी पाठ",
    "ภาษาไทย",
    "Việt Nam",
]
_ODD = [
    "\u00a0",
    "\u200b",
    "\ufeff",
    "\u2028",
    "\u0301",
    "e\u0301",
    "\u00ad",
    "\x7f",
    "\x01",
    "\u2581",
    "�",
]


class _Dice:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def below(self, n: int) -> int:
        return int(self._random.random() * n)

    def one(self, items: Sequence[Any]) -> Any:
        return items[self.below(len(items))]

    def some(self, items: Sequence[str], most: int, joint: str = " ") -> str:
        return joint.join(self.one(items) for _ in range(1 + self.below(most)))


def stress_lines(count: int = LINES) -> list[str]:
    dice = _Dice(20261130)
    kinds: list[Callable[[], str]] = [
        lambda: dice.some(_WORDS, 14),
        lambda: dice.some(_WORDS, 8, " " * (1 + dice.below(5))),
        lambda: dice.one(_WORDS).upper() + dice.one("!?.,;:") + " " + dice.some(_WORDS, 6),
        lambda: " " * dice.below(40) + dice.some(_WORDS, 3) + " " * dice.below(9),
        lambda: "".join(dice.one("0123456789") for _ in range(1 + dice.below(25))),
        lambda: dice.some(["12", "3.14159", "-7", "1e-9", "0x1F", "2024-11-30", "100%", "$5"], 6),
        lambda: dice.some(_EMOJI, 6, dice.one(["", " "])),
        lambda: dice.some(_CJK, 30, ""),
        lambda: dice.some(_CJK, 6, "") + dice.some(_WORDS, 3) + dice.some(_CJK, 6, ""),
        lambda: dice.some(_CODE, 3, dice.one(["\n", "\n\n", "\r\n"])),
        lambda: dice.some(_SPECIAL, 3, dice.one(["", " ", "x"])),
        lambda: dice.some(_WORDS, 4) + dice.one(_SPECIAL) + dice.some(_WORDS, 4),
        lambda: dice.one("aA =-_.\n\t#*你😀'\"") * (1 + dice.below(90)),
        lambda: dice.some(_SCRIPTS, 3),
        lambda: dice.some([*_ODD, *_WORDS[:9]], 7, dice.one(["", " "])),
        lambda: "".join(
            ["\n" * dice.below(6), dice.some(_WORDS, 3), "\n" * dice.below(6), " " * dice.below(6)]
        ),
    ]
    return [dice.one(kinds)() for _ in range(count)]


def score_vocabulary() -> dict[str, Any]:
    """Keys ``tokenizer.ggml.*`` of a vocabulary as Llama 2's: bytes, characters, scored pieces.

    Pieces are frequent parts of the lines, runs of one character among them; scores are random, so
    that the order of merges matters, and some are equal, so that the place does.
    """
    dice = _Dice(7)
    counted: Counter[str] = Counter()
    for line in stress_lines(400):
        for word in line.replace(" ", " \u2581").split(" "):
            for start in range(len(word)):
                counted.update(word[start : start + size] for size in (2, 3, 4, 5, 7))
    # Without angle brackets, out of whose pieces llama.cpp would merge control tokens.
    pieces = [text for text, _ in sorted(counted.items(), key=lambda item: (-item[1], item[0]))]
    pieces = [text for text in pieces if len(text) > 1 and not {"<", ">"} & {*text}][:1500]
    pieces += [run * size for run in ("\u2581", "a", "=", "-", "你") for size in (2, 3, 4, 5, 8)]
    characters = sorted({char for text in pieces for char in text} - {"你"} | {"<", ">"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "[INST]"]
    types = [2, 3, 3, *[6] * 256, 4]
    scores = [0.0] * len(tokens)
    for text in dict.fromkeys([*characters, *pieces]):
        tokens.append(text)
        types.append(1)
        scores.append(-1.0 - dice.below(600) / 4)
    return {"tokens": tokens, "token_type": types, "scores": scores}


def checksum(ids: Sequence[int]) -> str:
    """8 hex digits of a line's ids."""
    return f"{zlib.crc32(','.join(map(str, ids)).encode()):08x}"
