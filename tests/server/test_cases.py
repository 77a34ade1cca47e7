"""Cases of well-known mistakes, on a running server with the real engine.

Only the model is told what to say: given tokens, or given logits.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvsieve.engine.batch import Batch
from kvsieve.engine.llm import LLM
from kvsieve.engine.sequence import Sequence
from kvsieve.engine.service import Service
from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.kernels.backend import SegmentStats, StepStats
from kvsieve.server.config import ServerConfig
from kvsieve.server.served import served_model
from kvsieve.types import F32
from tests.engine.vocabularies import tiny_metadata
from tests.server.live import CHAT, COMPLETION, USER, Live, error_of, post, serving
from tests.tiny_model import CHAT_TEMPLATE, write_tiny_gguf

BOS, EOS = 1, 2
SMILE, GOOD = "\U0001f600", "\u597d"
_SMILE, _GOOD = SMILE.encode(), GOOD.encode()
PIECES = ["DEF", "HI", "The quick br", "own", " fox"]

Rows = Callable[[Sequence], F32]


class Puppet:
    """Takes the place of a model's passes: `rows` says the logits after what a sequence said."""

    def __init__(self, llm: LLM) -> None:
        self.prompts: list[list[int]] = []
        self.vocab = llm.config.vocab_size
        self.tokenizer = llm.tokenizer
        self.rows: Rows = lambda _: self.only(EOS)
        llm.engine.runner.forward = self._forward  # type: ignore[method-assign]

    def only(self, *tokens: int, logits: Any = (0.0,)) -> F32:
        row = np.full(self.vocab, -np.inf, np.float32)
        row[list(tokens)] = logits
        return row

    def says(self, tokens: list[int]) -> None:
        def rows(sequence: Sequence) -> F32:
            place = len(sequence.output_ids)
            return self.only(tokens[place] if place < len(tokens) else EOS)

        self.rows = rows

    def _forward(self, batch: Batch, **_: object) -> tuple[list[F32 | None], StepStats]:
        logits: list[F32 | None] = []
        for step in batch.steps:
            if step.start == 0:
                self.prompts.append(step.sequence.prompt_ids.tolist())
            step.sequence.cache.reserve(step.end)
            step.sequence.cache.commit(step.end)
            row = self.rows(step.sequence)
            logits.append(None if step.logit_rows == "none" else row[None])
        stats = [SegmentStats(pairs_attended=1, pairs_causal=1) for _ in batch.steps]
        return logits, StepStats(segments=stats)


@contextlib.contextmanager
def puppet_server(path: Path, **metadata: Any) -> Iterator[tuple[Puppet, Live]]:
    write_tiny_gguf(path, **metadata)
    with (
        LLM(path, backend="reference") as llm,
        Service(llm, max_queue=200, cache_ram_bytes=0) as service,
    ):
        puppet = Puppet(llm)
        served = served_model(llm, service)
        try:
            with serving(served, ServerConfig(port=0)) as live:
                yield puppet, live
        finally:
            served.close()


def pieced(words: list[bytes]) -> dict[str, Any]:
    """Metadata of a vocabulary that has these five tokens beside its bytes."""
    spelled = {_spelling(word): int(gguf.TokenType.NORMAL) for word in words}
    metadata = tiny_metadata(extra=spelled)
    return {**metadata, "tokenizer.ggml.token_type": metadata["tokenizer.ggml.token_type"].tolist()}


def _spelling(word: bytes) -> str:
    """As byte-level vocabularies write it."""
    from tests.tiny_model import byte_spelling

    return "".join(byte_spelling()[byte] for byte in word)


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Puppet, Live]]:
    path = tmp_path_factory.mktemp("words") / "tiny.gguf"
    with puppet_server(path, **pieced([one.encode() for one in PIECES])) as running:
        yield running


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Puppet, Live]]:
    path = tmp_path_factory.mktemp("parts") / "tiny.gguf"
    pieces = [_SMILE[:2], _SMILE[2:], _SMILE[:3], b" " + _SMILE[:2], _GOOD[1:]]
    with puppet_server(path, **pieced(pieces)) as running:
        yield running


def tokens_of(tokenizer: Any, pieces: list[str | bytes]) -> list[int]:
    """Ids of tokens by the exact bytes that they stand for."""
    assert isinstance(tokenizer, Tokenizer)
    by_bytes = {tokenizer.token_bytes(one): one for one in range(3, tokenizer.vocab_size)}
    return [by_bytes[one.encode() if isinstance(one, str) else one] for one in pieces]


def replies(live: Live, **asked: Any) -> Iterator[tuple[str, str, list[str], list[int]]]:
    """Text, finish reason, pieces and logged bytes of chat and completion, whole and streamed."""
    for path, body in ((CHAT, {"messages": [USER]}), (COMPLETION, {"prompt": "x"})):
        whole = post(live, path, {**body, **asked, "max_tokens": asked.get("max_tokens", 50)})
        assert whole.status_code == 200, whole.text
        choice = whole.json()["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        logged = (choice.get("logprobs") or {}).get("content") or []
        yield text, choice["finish_reason"], [text], [b for one in logged for b in one["bytes"]]
        streamed = post(
            live,
            path,
            {**body, **asked, "max_tokens": asked.get("max_tokens", 50), "stream": True},
        )
        lines = [line[6:] for line in streamed.text.splitlines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
        pieces = [
            (one["delta"].get("content") or "") if path == CHAT else one["text"] for one in choices
        ]
        entries = [one["logprobs"] for one in choices if one.get("logprobs") and path == CHAT]
        raw = [b for one in entries for token in one["content"] for b in token["bytes"]]
        yield "".join(pieces), choices[-1]["finish_reason"], pieces, raw


@pytest.mark.parametrize(
    ("said", "stop", "text"),
    [
        (["DEF", "G", "HI", "J", "x"], "DEFGHIJ", ""),
        (["DEF", "G", "HI", "J", "x"], ["DEFGHIJ"], ""),
        (["The quick br", "own", " fox", "x"], ["own fox"], "The quick br"),
        # Two of which the shorter one ends first; and one that begins earlier but never ends.
        (["DEF", "G", "HI", "J"], ["DEFGHIJ", "EF"], "D"),
        (["DEF", "G", "HI", "J"], ["DEFGHIX", "HI"], "DEFG"),
        (["DEF", "G", "HI", "J"], ["FG", "GH"], "DE"),
        (["DEF", "G", "HI", "J"], None, "DEFGHIJ"),
        (["DEF", "G", "HI", "J"], ["1", "2", "3", "4", "HI"], "DEFG"),
        (["DEF", "G", "HI"], "HIJ", "DEFGHI"),
    ],
)
def test_stop_strings_across_tokens(
    words: tuple[Puppet, Live], said: list[str], stop: Any, text: str
) -> None:
    """Case STR-01, with its very pieces."""
    puppet, live = words
    puppet.says(tokens_of(puppet.tokenizer, [*said]))
    for got, reason, pieces, _ in replies(live, stop=stop):
        assert (got, reason) == (text, "stop")
        # Nothing that was sent had to be taken back.
        assert text.startswith("".join(pieces))
    error_of(post(live, COMPLETION, {"prompt": "x", "stop": [""]}))


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ([_SMILE[:2], _SMILE[2:]], SMILE),
        ([bytes([byte]) for byte in _SMILE], SMILE),
        ([_SMILE[:3], _SMILE[3:]], SMILE),
        ([b" " + _SMILE[:2], _SMILE[2:]], " " + SMILE),
        ([_GOOD[:1], _GOOD[1:]], GOOD),
        ([b"\xff"], "\ufffd"),
        ([b"a", b"\xff", b"b"], "a\ufffdb"),
        ([_SMILE[:2], b"x"], "\ufffdx"),
    ],
)
def test_characters_across_tokens(parts: tuple[Puppet, Live], said: list[bytes], text: str) -> None:
    """Case STR-03."""
    puppet, live = parts
    puppet.says(tokens_of(puppet.tokenizer, [*said]))
    for got, _, pieces, _ in replies(live):
        assert got == text
        assert sum(piece.count("\ufffd") for piece in pieces) == text.count("\ufffd")
    chats = list(replies(live, logprobs=True))[:2]
    assert [bytes(raw) for *_, raw in chats] == [b"".join(said)] * 2


def test_characters_that_are_cut_or_stopped_at(parts: tuple[Puppet, Live]) -> None:
    """Case STR-03: the limit falls within a character, and a stop string holds one."""
    puppet, live = parts
    puppet.says(tokens_of(puppet.tokenizer, [b"a", _SMILE[:2], _SMILE[2:], b"b"]))
    assert {reply[:2] for reply in replies(live, max_tokens=2)} == {("a\ufffd", "length")}
    assert {reply[:2] for reply in replies(live, stop=SMILE)} == {("a", "stop")}
    assert {reply[:2] for reply in replies(live, stop=SMILE + "b")} == {("a", "stop")}
    assert {reply[:2] for reply in replies(live, stop=SMILE + "c")} == {(f"a{SMILE}b", "stop")}


WITHOUT_BOS = CHAT_TEMPLATE.replace("<|im_start|>", "# ")
WITH_BOS = "{{ bos_token }}" + WITHOUT_BOS
BOS_TEXT = "<|im_start|>" + WITHOUT_BOS


@pytest.mark.parametrize(
    ("template", "add_bos", "count"),
    [
        (WITH_BOS, True, 1),
        (WITHOUT_BOS, True, 1),
        (WITHOUT_BOS, False, 0),
        (BOS_TEXT, False, 1),
        (BOS_TEXT, True, 1),
    ],
)
def test_bos_comes_once(tmp_path: Path, template: str, add_bos: bool, count: int) -> None:
    """Case TPL-01, over HTTP: what the engine was given."""
    metadata = {"tokenizer.chat_template": template, "tokenizer.ggml.add_bos_token": add_bos}
    with puppet_server(tmp_path / "tiny.gguf", **metadata) as (puppet, live):
        post(live, CHAT, {"messages": [USER]})
        ids = puppet.prompts[-1]
        assert ids.count(BOS) == (ids[0] == BOS) == count
        rendered = post(live, "/apply-template", {"messages": [USER]}).json()["prompt"]
        bare = {"content": rendered.removeprefix("<|im_start|>")}
        assert ids[count:] == post(live, "/tokenize", bare).json()["tokens"]
        counted = post(live, "/v1/chat/completions/input_tokens", {"messages": [USER]}).json()
        assert counted["input_tokens"] == len(ids)
        # Documented: a raw prompt is taken as it is, and BOS of the model comes on top.
        post(live, COMPLETION, {"prompt": "<|im_start|>x"})
        assert puppet.prompts[-1].count(BOS) == 1 + add_bos


LOW, BEST, MIDDLE = 100, 101, 102
BEST_ONLY: list[dict[str, Any]] = [
    *({"temperature": t} for t in (0, 1e-6, 1e-320)),
    *({"temperature": 1, "top_p": p} for p in (0, 1e-9)),
    *({"temperature": 1, **one} for one in ({"top_k": 1}, {"min_p": 1})),
]
ALL_THREE: list[dict[str, Any]] = [
    {"temperature": 1, "top_p": 1, "min_p": 0, "top_k": k} for k in (0, -1, None, 3, 10**9)
]


def drawn(live: Live, count: int, **asked: Any) -> set[int]:
    """Tokens among `count` draws."""
    body = {"prompt": "x", "max_tokens": 1, "n": count, "seed": 1, **asked}
    choices = post(live, COMPLETION, {**body, "logprobs": 0}).json()["choices"]
    assert len(choices) == count
    return {choice["logprobs"]["tokens"][0] for choice in choices}


def test_sampler_edges(words: tuple[Puppet, Live]) -> None:
    """Case SMP-01: logits 1, 3, 2."""
    puppet, live = words
    puppet.rows = lambda _: puppet.only(LOW, BEST, MIDDLE, logits=(1, 3, 2))
    names = [puppet.tokenizer.decode([one]) for one in (LOW, BEST, MIDDLE)]
    for asked in BEST_ONLY:
        assert drawn(live, 20, **asked) == {names[1]}, asked
    for asked in ALL_THREE:
        assert drawn(live, 100, **asked) == set(names), asked
    puppet.rows = lambda _: puppet.only(LOW, BEST, MIDDLE, logits=(3, 3, 1))
    assert drawn(live, 20, temperature=0) == {names[0]}
    for name, value in (
        *(("temperature", -1), ("top_p", 1.5), ("top_p", -0.1), ("min_p", 2)),
        ("temperature", float("nan")),
    ):
        body = json.dumps({"prompt": "x", name: value}).encode()
        error_of(post(live, COMPLETION, body))


def test_greedy_and_drawn_rows_in_one_batch(words: tuple[Puppet, Live]) -> None:
    """Case SMP-01: each as if it were alone."""
    puppet, live = words
    puppet.rows = lambda _: puppet.only(LOW, BEST, MIDDLE, logits=(1, 3, 2))
    bodies = [
        {"prompt": "x", "max_tokens": 8, "temperature": t, "seed": 3} for t in (0, 1.0, 0, 5.0)
    ]
    alone = [post(live, COMPLETION, body).json()["choices"][0]["text"] for body in bodies]
    together = [""] * len(bodies)

    def ask(place: int) -> None:
        reply = post(live, COMPLETION, bodies[place]).json()
        together[place] = reply["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone
