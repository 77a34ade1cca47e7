import json
from pathlib import Path

import numpy as np
import pytest

from kvsieve.engine.constraint import Constraint, ConstraintCompiler, Matcher
from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.errors import ConfigError
from tests.engine import scripted
from tests.tiny_model import EOS_ID

AGE = {
    "type": "object",
    "properties": {"age": {"type": "integer"}},
    "required": ["age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return scripted.tiny_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer)


def allowed(matcher: Matcher, tokenizer: Tokenizer) -> set[bytes]:
    """First bytes that may come next; the end token is b""."""
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    matcher.exclude(logits)
    ids = np.flatnonzero(np.isfinite(logits))
    assert all(token in tokenizer.eos_ids or tokenizer.token_bytes(int(token)) for token in ids)
    return {tokenizer.token_bytes(int(token))[:1] for token in ids}


def say(matcher: Matcher, tokenizer: Tokenizer, text: str) -> None:
    for token in tokenizer.encode(text, add_special=False):
        matcher.accept(token)


def test_a_schema_allows_what_fits_and_nothing_else(
    compiler: ConstraintCompiler, tokenizer: Tokenizer
):
    matcher = compiler.matcher(Constraint.json_schema(AGE))
    assert allowed(matcher, tokenizer) == {b"{"}
    say(matcher, tokenizer, '{"age": 4')
    following = allowed(matcher, tokenizer)
    assert b"}" in following
    assert b"7" in following
    assert not following & {b'"', b",", b"x", b""}
    assert not matcher.is_done
    say(matcher, tokenizer, "2}")
    assert matcher.is_done
    assert allowed(matcher, tokenizer) == {b""}


def test_an_end_token_is_allowed_where_the_text_is_whole(
    compiler: ConstraintCompiler, tokenizer: Tokenizer
):
    matcher = compiler.matcher(Constraint.regex("ab*"))
    assert allowed(matcher, tokenizer) == {b"a"}
    say(matcher, tokenizer, "a")
    assert allowed(matcher, tokenizer) == {b"b", b""}
    assert not matcher.is_done
    logits = np.zeros(tokenizer.vocab_size, np.float32)
    matcher.exclude(logits)
    assert np.isfinite(logits[EOS_ID])


def test_a_grammar(compiler: ConstraintCompiler, tokenizer: Tokenizer):
    matcher = compiler.matcher(Constraint.lark('start: "(" start ")" | "x"'))
    say(matcher, tokenizer, "((x)")
    assert allowed(matcher, tokenizer) == {b")"}


def test_any_object(compiler: ConstraintCompiler, tokenizer: Tokenizer):
    matcher = compiler.matcher(Constraint.json_object())
    say(matcher, tokenizer, json.dumps({"a": [1, {"b": None}]}))
    assert matcher.is_done


def test_blanks_between_values_are_bounded(compiler: ConstraintCompiler, tokenizer: Tokenizer):
    matcher = compiler.matcher(Constraint.json_object())
    say(matcher, tokenizer, "{\n ")
    assert not allowed(matcher, tokenizer) & {b" ", b"\n"}


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "strange"}, "strange"),
        ({"type": "string", "format": "weird"}, "weird"),
        ({"type": "string", "pattern": "(a"}, "unclosed group"),
        ({"$ref": "http://example.com/schema"}, "example.com"),
        ([1, 2], "expected a JSON object"),
        ("{", "expected a JSON object"),
        ({"x": {1, 2}}, "expected a JSON object"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(schema: object, word: str):
    with pytest.raises(ConfigError, match=r"^\[Constraint\] json_schema: expected") as raised:
        Constraint.json_schema(schema)  # type: ignore[arg-type]
    assert word in str(raised.value)


@pytest.mark.parametrize("as_text", [False, True])
def test_deep_nesting_is_refused(as_text: bool):
    deep = '{"not":' * 60_000 + "{}" + "}" * 60_000
    schema: object = deep
    if not as_text:
        schema = {}
        for _ in range(60_000):
            schema = {"items": schema}
    with pytest.raises(ConfigError, match=r"\[Constraint\] json_schema"):
        Constraint.json_schema(schema)  # type: ignore[arg-type]


def test_a_bad_expression_or_grammar():
    with pytest.raises(ConfigError, match=r"\[Constraint\] regex"):
        Constraint.regex("(a")
    with pytest.raises(ConfigError, match=r"\[Constraint\] lark"):
        Constraint.lark("start: nothing_there")
    with pytest.raises(ConfigError, match=r"\[Constraint\] source"):
        Constraint.regex("")
    with pytest.raises(ConfigError, match=r"\[Constraint\] kind"):
        Constraint(kind="gbnf", source="x")  # type: ignore[arg-type]


def test_a_model_without_a_vocabulary_cannot_follow_one(tmp_path: Path):
    from kvsieve.engine.no_vocabulary import NoVocabulary
    from kvsieve.models.config import ModelConfig
    from kvsieve.models.gguf import GgufFile
    from tests.tiny_model import write_tiny_gguf

    with GgufFile.open(write_tiny_gguf(tmp_path / "ids.gguf", no_vocab=True)) as file:
        compiler = ConstraintCompiler(NoVocabulary(ModelConfig.from_gguf(file)))
    with pytest.raises(ConfigError, match="no vocabulary"):
        compiler.matcher(Constraint.json_object())
