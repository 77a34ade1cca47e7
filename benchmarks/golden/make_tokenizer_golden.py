"""Freeze llama.cpp's token ids for `tests/engine/test_tokenizer.py`.

Needs llama-cpp-python (0.3.36 made the files in the repository) and SmolLM2's GGUF:

    python benchmarks/golden/make_tokenizer_golden.py --model SmolLM2-135M-Instruct.Q4_1.gguf

Every rule for cutting text runs over two vocabularies; llama.cpp can override the name of the
pre-tokenizer in a file.

- `tokenizer_llama_cpp.jsonl`: SmolLM2's own. The first line holds facts about the model, each
  other line one text: `ids` and `plain` (special tokens not parsed) under the file's own rule,
  and the ids under other rules where they differ.
- `tokenizer_probe.jsonl`: one made here, in which any two or three neighbours out of a few
  characters merge, so that ids show every cut (SmolLM2 has no token of two digits, say). The
  first line holds its tokens and merges, each other line a text and its ids under each rule.

Texts are made here from seeds, so that a second run gives the same files.
"""

import argparse
import json
import random
import struct
import tempfile
from pathlib import Path
from typing import Any

import llama_cpp

DATA = Path(__file__).parents[2] / "tests" / "data"
OTHER_RULES = ("llama-bpe", "gpt-2", "qwen2")
RULES = ("smollm", *OTHER_RULES)

PLAIN = [
    "",
    " ",
    "a",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "The pass key is 71432. Remember it. 71432 is the pass key.",
    "What is the pass key? The pass key is",
    "It's, we're, they've, I'm, you'll, he'd, can't",
    "IT'S, WE'RE, THEY'VE, I'M, YOU'LL, HE'D, CAN'T",
    "It’s ’re 're're''s ''' 'S'sS 'lL 'Ll 'rE",
    "naïve café, Ærøskøbing, Zażółć gęślą jaźń, İstanbul, ſharp 'ſ",
    "Русский текст, ёлка; Ελληνικά; עברית עם ניקוד שָׁלוֹם; العربية 123",
    "हिन्दी में लिखा हुआ; ไทยไม่มีช่องว่าง; বাংলা; தமிழ்",
    "中文没有空格，所以分词很难。日本語のテキストです。한국어 문장입니다.",
    "你好，世界！ Hello 世界 123 世界",
    "😀😃😄 👨‍👩‍👧‍👦 👍🏽 🇫🇷🇩🇪 ❤️ ☃ a😀b 😀 c",
    "e\u0301 vs \u00e9, n\u0303, a\u0300\u0301\u0302\u0303 zalgo",
    "½ ¼ ² ³ ① Ⅷ ⅷ 一二三 ١٢٣ १२३ ෧ 𝟘𝟙𝟚 ㊿ 1½2",
    "$1,234.56 €99 £5 ¥100 10% 3.14159 1e-10 0x7F 0b1010 1_000_000",
    "2026-11-29T18:46:00Z 192.168.0.1 ::1 +49 (30) 123-456",
    "http://example.org/a/b?c=d&e=f#g user@example.org #tag @user",
    "def f(x):\n    return x + 1\n\n\nclass A:\n\tpass\n",
    'for (int i = 0; i < 10; ++i) { printf("%d\\n", i); }  // comment',
    "<html>\n  <body class=\"x\">&nbsp;</body>\n</html>",
    '{"a": [1, 2.5, null], "b": {"c": "\\u00e9"}}',
    "SELECT * FROM t WHERE a >= 10 AND b <> 'x''y';",
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n- item\n  - sub\n\n```py\nx=1\n```",
    "!!! ??? ... --- ___ *** ### <<< >>> === ~~~ ((())) [[[]]] {{{}}}",
    "a\r\nb\r\n\r\nc\rd\n\re",
    "\n", "\r\n", "\t", "\n\n\n", " \n", "\n ", " \n \n  \n", "\t\t x", "  \t  \n\t ",
    "x ", "x  ", "x   ", " x", "  x", "   x", "x  y", "x   y", "x \n y", "x\n\n y", "x!\n\ny",
    "!\r\n\r\n x", "a \n\n\n  b", "  1", "1  ", "1  2", "a1b2c3", "  12  345 6", "1 \n2", "9\n\n9",
    "a\u00a0b\u00a0\u00a0c", "\u3000全角\u3000空白\u3000", "a\u2003\u2003b",
    "a\u2028b\u2029c\u0085d",
    "\u200bzero\u200bwidth\u200d\ufeff", "\ufeffBOM", "\u202eright to left\u202c",
    "a\u1680b\u205fc", "\0", "\0\0\0", "a\0b",
    "\x01\x02\x03\x04\x05\x06\x07\x08\x0b\x0c\x0e\x13\x14\x16\x1b\x1d\x1f\x7f",
    "a\x04b\x13c \x16\x1d d", "\x1c\x1d\x1e\x1f x\x1c y", "\x80\x81\x9f\xa0\xad\xff",
    "\ufffd\ufffe\uffff\ufdd0", "\U0010ffff\U000e0001\U000f0000\U00040000x\U00080000>",
    "Ġ Ċ ĉ Ā ÿ Ġthe Ġ Ġ", "▁the ▁▁", "<0x0A> <0xFF>", "𐍈𐀀🜁𝒜", "ﬁ ﬂ ﬃ ǅ ß ẞ ŉ",
    "a" * 300, " " * 300, "\n" * 300, "0" * 300, "!" * 300, "é" * 100, "好" * 100, "😀" * 50,
    "ab" * 150, " a" * 150, "=" * 80, "-" * 81, " " * 17 + "x", "\t" * 9 + "y", "\r\n" * 40,
]  # fmt: skip

SPECIAL = [
    "<|endoftext|>",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
    "  <|im_end|>  ",
    "a<|im_end|>b<|im_end|><|im_end|>",
    "<|im_end|", "|im_end|>", "<|im_end|>>", "<<|im_end|>", "<|IM_END|>", "<| im_end |>",
    "<repo_name>x<file_sep>y<filename>z<gh_stars>1", "<reponame><issue_start><issue_closed>",
    "<jupyter_code>print(1)<jupyter_output>1<empty_output>",
    "<|im_start|>\n\n<|im_start|> 1 2 <|im_start|>",
    "<|im_<|im_end|>end|>", "<|endoftext|><|endoftext|> it's", "don<|im_end|>'t",
]  # fmt: skip

SENTENCE = (
    "the of and a to in is that it was for on are as with his they at be this from have or by one "
    "attention cache block sparse Pneumonoultramicroscopicsilicovolcanoconiosis e.g. i.e. U.S.A. "
    "don't we'll I'd Straße façade 東京 привет naïve x86-64 C++20 O(n^2) 3.14 1,000 42nd 1st 2026"
)
GAPS = [*4 * [" "], "  ", "\n", "\n\n", "\t", " \n", "\r\n", "", ", ", ". ", "! ", " - ", "'"]
ALPHABETS = (
    "ab cd1 2.",
    "aA'sStTrReEvVlLdDmM ",
    " \n\r\t\u00a0\u3000x1!",
    "0123456789 .,a",
    "é好😀ж\u0301\u200d ½²a1",
    "(){}[]<>|_=+-*/ \n",
)
PROBE = "'aSs1! \n\r"
RANGES = ((0, 0x250), (0x250, 0x2000), (0x2000, 0x3100), (0x3100, 0xD800), (0xE000, 0x110000))


def random_texts(seed: int) -> list[str]:
    """Sentences of words and gaps, strings over small alphabets, and characters from everywhere."""
    rng = random.Random(seed)
    words = SENTENCE.split()
    texts = []
    for _ in range(80):
        size = rng.randint(3, 25)
        texts.append("".join(rng.choice(words) + rng.choice(GAPS) for _ in range(size)))
    for alphabet in ALPHABETS:
        texts += ["".join(rng.choices(alphabet, k=rng.randint(2, 40))) for _ in range(20)]
    for low, high in RANGES:
        for _ in range(10):
            chars = (chr(rng.randrange(low, high)) for _ in range(rng.randint(3, 20)))
            texts.append("".join(char + rng.choice(("", "", " ", "a", "1")) for char in chars))
    return texts


def probe_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges: bytes in GPT-2's spelling, then every pair and triple of the probe."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    spelling = {byte: chr(byte) for byte in kept}
    others = (byte for byte in range(256) if byte not in spelling)
    spelling.update({byte: chr(0x100 + place) for place, byte in enumerate(others)})
    chars = [spelling[ord(char)] for char in PROBE]
    pairs = [f"{a} {b}" for a in chars for b in chars]
    triples = [f"{a}{b} {c}" for a in chars for b in chars for c in chars]
    merges = [*pairs, *triples]
    return [*spelling.values(), *(merge.replace(" ", "") for merge in merges)], merges


def probe_texts(seed: int) -> list[str]:
    rng = random.Random(seed)
    texts = ["".join(rng.choices(PROBE, k=rng.randint(3, 24))) for _ in range(150)]
    # Longer runs of one character, which a uniform choice hardly ever makes.
    for _ in range(100):
        runs = (
            rng.choice(PROBE) * rng.choice((1, 1, 2, 3, 4, 7)) for _ in range(rng.randint(2, 8))
        )
        texts.append("".join(runs))
    return texts


def write_vocabulary(path: Path, tokens: list[str], merges: list[str]) -> None:
    """Write a GGUF (version 3) that holds a vocabulary and no tensors."""

    def string(text: str) -> bytes:
        return struct.pack("<Q", len(text.encode())) + text.encode()

    def strings(texts: list[str]) -> bytes:
        return struct.pack("<IQ", 8, len(texts)) + b"".join(map(string, texts))

    kinds = struct.pack(f"<IQ{len(tokens)}i", 5, len(tokens), *[1] * len(tokens))
    entries: list[tuple[str, int, bytes]] = [
        ("general.architecture", 8, string("llama")),
        ("tokenizer.ggml.model", 8, string("gpt2")),
        ("tokenizer.ggml.pre", 8, string("smollm")),
        ("tokenizer.ggml.add_bos_token", 7, b"\0"),
        ("tokenizer.ggml.tokens", 9, strings(tokens)),
        ("tokenizer.ggml.token_type", 9, kinds),
        ("tokenizer.ggml.merges", 9, strings(merges)),
    ]
    body = b"".join(string(key) + struct.pack("<I", kind) + value for key, kind, value in entries)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(entries)) + body)


def open_model(path: Path, rule: str) -> llama_cpp.Llama:
    return llama_cpp.Llama(
        str(path), vocab_only=True, verbose=False, kv_overrides={"tokenizer.ggml.pre": rule}
    )


def tokenize(model: llama_cpp.Llama, text: str, *, special: bool = True) -> list[int]:
    return model.tokenize(text.encode(), add_bos=True, special=special)


def golden_lines(path: Path) -> list[dict[str, Any]]:
    own = open_model(path, "smollm")
    others = {rule: open_model(path, rule) for rule in OTHER_RULES}
    vocab = own._model.vocab
    facts = {
        "llama_cpp_python": llama_cpp.__version__,
        "model": path.name,
        "vocab_size": own.n_vocab(),
        "bos_id": own.token_bos(),
        "end_ids": [i for i in range(own.n_vocab()) if llama_cpp.llama_vocab_is_eog(vocab, i)],
    }
    lines: list[dict[str, Any]] = [facts]
    for text in dict.fromkeys([*PLAIN, *SPECIAL, *random_texts(20261129)]):
        ids = tokenize(own, text)
        line = {"text": text, "ids": ids}
        plain = tokenize(own, text, special=False)
        if plain != ids:
            line["plain"] = plain
        by_rule = {rule: tokenize(model, text) for rule, model in others.items()}
        line.update({rule: found for rule, found in by_rule.items() if found != ids})
        lines.append(line)
    return lines


def probe_lines() -> list[dict[str, Any]]:
    tokens, merges = probe_vocabulary()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "probe.gguf"
        write_vocabulary(path, tokens, merges)
        models = {rule: open_model(path, rule) for rule in RULES}
    lines: list[dict[str, Any]] = [{"tokens": tokens, "merges": merges}]
    for text in dict.fromkeys(probe_texts(20261130)):
        lines.append({"text": text, **{r: tokenize(model, text) for r, model in models.items()}})
    return lines


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="ascii", newline="\n") as file:
        for line in lines:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    print(f"{len(lines) - 1} texts -> {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--output", type=Path, default=DATA, help="folder of the two files")
    args = parser.parse_args()
    write_lines(args.output / "tokenizer_llama_cpp.jsonl", golden_lines(args.model))
    write_lines(args.output / "tokenizer_probe.jsonl", probe_lines())


if __name__ == "__main__":
    main()
