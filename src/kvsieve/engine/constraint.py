"""Replies that must fit a JSON schema, a regular expression or a grammar, token by token."""

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from kvsieve.engine.no_vocabulary import AnyTokenizer, NoVocabulary
from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.errors import ConfigError
from kvsieve.types import F32, I32

ConstraintKind = Literal["json_schema", "regex", "lark"]

MAX_NESTING = 64
"""Levels of a schema: compilers and printers of JSON recurse."""

MAX_SOURCE = 256 * 1024
"""Characters of a schema or grammar."""

_WHITESPACE = r"[ \n]{0,2}"
"""Between the parts of a JSON value: without a bound, a small model may write blanks forever."""


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """What a reply has to match from its first character to its last; checked when it is made.

    ConfigError: not a sound schema, expression or grammar, or a keyword of JSON Schema that
    cannot be enforced (none is ever ignored; annotations such as ``title`` ask for nothing).
    """

    kind: ConstraintKind
    source: str

    def __post_init__(self) -> None:
        if self.kind not in get_args(ConstraintKind):
            raise ConfigError(
                f"[Constraint] kind: expected one of {', '.join(get_args(ConstraintKind))}, "
                f"got {self.kind!r}"
            )
        if not isinstance(self.source, str) or not 0 < len(self.source) <= MAX_SOURCE:
            got = f"{len(self.source)}" if isinstance(self.source, str) else repr(self.source)
            raise ConfigError(
                f"[Constraint] source: expected 1 to {MAX_SOURCE} characters, got {got}"
            )
        from llguidance import LLMatcher

        problem = LLMatcher.validate_grammar(self.grammar())
        if problem:
            line = " ".join(str(problem).split())
            raise ConfigError(
                f"[Constraint] {self.kind}: expected one that can be enforced, got {line[:300]}"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool | str) -> "Constraint":
        """A JSON value that fits `schema`, given as an object or as JSON text."""
        value = schema
        try:
            if isinstance(schema, str):
                value = json.loads(schema)
            _check_nesting(value)
            text = json.dumps(value, sort_keys=False)
        except (ValueError, TypeError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"[Constraint] json_schema: expected a JSON object, got {error}"
            ) from None
        if not isinstance(value, (dict, bool)):
            raise ConfigError(f"[Constraint] json_schema: expected a JSON object, got {text[:80]}")
        return cls(kind="json_schema", source=text)

    @classmethod
    def json_object(cls) -> "Constraint":
        """Any JSON object."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> "Constraint":
        """Text that matches `pattern` as a whole, in the syntax of Rust's regex crate."""
        return cls(kind="regex", source=pattern)

    @classmethod
    def lark(cls, grammar: str) -> "Constraint":
        """Text of a context-free grammar in Lark's syntax, as llguidance reads it."""
        return cls(kind="lark", source=grammar)

    def grammar(self) -> str:
        """The same as llguidance's matcher takes it."""
        from llguidance import LLMatcher

        if self.kind == "regex":
            return str(LLMatcher.grammar_from_regex(self.source))
        if self.kind == "lark":
            return str(LLMatcher.grammar_from_lark(self.source))
        overrides: Any = {"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE}
        return str(LLMatcher.grammar_from_json_schema(self.source, overrides=overrides))


class ConstraintCompiler:
    """Turns constraints into matchers over one model's tokens, which it prepares once.

    Preparing 49k tokens takes about half a second; a constraint then takes milliseconds.
    """

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self._tokenizer = tokenizer
        self._prepared: Any = None
        self._preparing = threading.Lock()

    def prepare(self) -> None:
        """Do now, once, what all matchers need. ConfigError without a vocabulary."""
        tokenizer = self._tokenizer
        if isinstance(tokenizer, NoVocabulary):
            raise tokenizer.error("constraint", got="one")
        with self._preparing:
            if self._prepared is None:
                self._prepared = _prepared_tokens(tokenizer)

    def matcher(self, constraint: Constraint) -> "Matcher":
        """A matcher at the beginning of a reply. ConfigError without a vocabulary."""
        self.prepare()
        from llguidance import LLMatcher

        matcher = LLMatcher(self._prepared, constraint.grammar(), log_level=0)
        return Matcher(matcher, vocab_size=self._tokenizer.vocab_size)


class Matcher:
    """Where one reply stands in its constraint."""

    def __init__(self, matcher: Any, *, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._mask: I32 = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self._check()

    @property
    def is_done(self) -> bool:
        """Whether nothing but an end token may follow."""
        return bool(self._matcher.is_stopped())

    def exclude(self, logits: F32) -> None:
        """Set the logits of tokens that may not come next to -inf; f32 ``[vocab]``, in place."""
        from llguidance.numpy import fill_next_token_bitmask

        fill_next_token_bitmask(self._matcher, self._mask)
        self._check()
        allowed = np.unpackbits(self._mask.view(np.uint8)[0], bitorder="little")
        logits[allowed[: self._vocab_size] == 0] = -np.inf

    def accept(self, token: int) -> None:
        """Step over a token that `exclude` left in."""
        self._matcher.consume_token(token)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            line = " ".join(str(self._matcher.get_error()).split())
            raise ConfigError(
                f"[Constraint] expected one that can be matched within its limits, got {line[:300]}"
            )


class _TokenTable:
    """The vocabulary as llguidance asks for it. Control tokens are no text of a reply."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        ids = range(tokenizer.vocab_size)
        spoken = [tokenizer.token_bytes(token) for token in ids]
        self.special_token_ids = [token for token in ids if not spoken[token]]
        self.tokens = [
            text or tokenizer.token_bytes(token, special=True) for token, text in enumerate(spoken)
        ]
        self.bos_token_id = tokenizer.bos_id
        # A model that names no end token never ends by one; the table needs an id all the same.
        self.eos_token_id = min(tokenizer.eos_ids, default=0)
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special=False, parse_special=False)


def _prepared_tokens(tokenizer: Tokenizer) -> Any:
    from llguidance import LLTokenizer, TokenizerWrapper

    table = _TokenTable(tokenizer)
    ends = sorted(tokenizer.eos_ids) or [table.eos_token_id]
    return LLTokenizer(TokenizerWrapper(table), n_vocab=tokenizer.vocab_size, eos_token=ends)


def _check_nesting(schema: object) -> None:
    level: list[object] = [schema]
    for _ in range(MAX_NESTING):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise ConfigError(
        f"[Constraint] json_schema: expected at most {MAX_NESTING} levels of nesting, got more"
    )


def _children(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list) else []
