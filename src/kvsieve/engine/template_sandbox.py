"""Runs the templates of model files: Jinja's immutable sandbox with bounds on time and memory.

A template is untrusted. It gets no loader and three additions: `raise_exception`,
`strftime_now`, `tojson`. Jinja's sandbox bounds neither time nor memory, so `_Environment` counts
what loops, calls, filters and output do, and refuses operations whose result would be huge. This
stops runaway templates within a second or two; a server that takes model files from strangers
should still render in a process it can kill.
"""

import functools
import json
import threading
from collections.abc import Callable, Mapping
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from kvsieve.errors import TemplateError

MAX_SOURCE_CHARS = 256 * 1024
"""The longest templates in use, with tools and reasoning, have about 20,000."""

MAX_OUTPUT_CHARS = 8 * 1024 * 1024
"""About 2 million tokens; also the longest string or list a template may make on the way."""

MAX_STEPS = 1_000_000
"""Loop rounds, calls and filters of one rendering, long values counting for more."""

_CHARS_PER_STEP = 64
_MAX_NUMBER = 100_000
"""Largest number handed to a function or filter: a count, width or range (Jinja's own limit)."""

_MAX_INTEGER_BITS = 256
_MAX_JSON_INDENT = 16

_PADDING = frozenset(
    {
        *("center", "ljust", "rjust", "zfill", "expandtabs", "wordwrap"),
        *("format", "format_map", "translate"),
    }
)
"""Methods and filters of strings whose result has any length; no chat template needs them."""

_STRUCTURAL = frozenset(
    {
        *("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items"),
        *("last", "length", "list", "map", "max", "min", "random", "reject", "rejectattr"),
        *("reverse", "select", "selectattr", "slice", "sort", "sum", "unique"),
    }
)
"""Filters that take a list as a list, and do not write it out."""

_INTERNAL = (Context, nodes.EvalContext, jinja2.Environment)


class CompiledTemplate:
    """A template ready to render; may be shared between threads."""

    def __init__(self, source: str) -> None:
        if len(source) > MAX_SOURCE_CHARS:
            raise TemplateError(
                f"[ChatTemplate] source: expected at most {MAX_SOURCE_CHARS} characters, "
                f"got {len(source)}"
            )
        self._environment = _Environment()
        self._template = self._guarded(lambda: self._environment.from_string(source))

    def render(self, values: Mapping[str, Any]) -> str:
        """Text for these variables; TemplateError for whatever goes wrong."""
        return str(self._guarded(lambda: self._template.render(values)))

    def _guarded(self, run: Callable[[], Any]) -> Any:
        self._environment.start()
        try:
            return run()
        except TemplateError:
            raise
        except jinja2.TemplateError as error:
            raise TemplateError(f"[ChatTemplate] source: {error.message or error}") from error
        except Exception as error:
            # The template is a program of someone else's: it may raise anything.
            raise TemplateError(
                f"[ChatTemplate] source: expected to render, got {type(error).__name__}: {error}"
            ) from error


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget. `start` begins a rendering in the calling thread."""

    intercepted_binops = frozenset({"+", "-", "*", "**", "%"})

    def __init__(self) -> None:
        # The budget comes first: Jinja calls `finalize` on constants while it compiles.
        self._left = threading.local()
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], finalize=self._output
        )
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        kept = {name: run for name, run in self.filters.items() if name not in _PADDING}
        kept.update(tojson=_tojson, indent=_indent)
        self.filters = {name: self._metered(name, run) for name, run in kept.items()}

    def start(self) -> None:
        self._left.steps = MAX_STEPS
        self._left.output = MAX_OUTPUT_CHARS

    def step(self, count: int = 1) -> bool:
        """Use up `count` steps. Woven into every loop and macro; true, to stand in conditions."""
        self._left.steps -= count
        if self._left.steps < 0:
            raise TemplateError(
                f"[ChatTemplate] source: expected to end within {MAX_STEPS} steps, got more"
            )
        return True

    def concatenate(self, *parts: object) -> str:
        """Jinja's operator ``~``."""
        self._check_size(sum(map(_written_size, parts)))
        return "".join(map(str, parts))

    def call(self, context: Context, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        if target in (self.step, self.concatenate):
            return target(*args)
        self._charge(*args, *kwargs.values())
        if isinstance(target, BuiltinMethodType) and isinstance(target.__self__, str) and args:
            text, name = target.__self__, target.__name__
            given = (args[0], text) if name == "join" else (text, *args)
            self._check_operation(name, given)
        return self._charged(super().call(context, target, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise TemplateError("[ChatTemplate] source: expected no formatting with %, got some")
        if operator == "*":
            count = left if isinstance(left, int) else right
            self._check_size(max(_length(left), _length(right)) * _size_of(count))
        elif operator == "**" and isinstance(left, int):
            self._check_bits(left.bit_length() * _size_of(right))
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int):
            self._check_bits(result.bit_length())
        return self._charged(result)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _PADDING:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Leave ``str.format`` to `is_safe_attribute`, which refuses it."""
        return None

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Meter().visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def _metered(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter: what goes in and what comes out is charged for."""

        @functools.wraps(run)
        def metered(*args: Any, **kwargs: Any) -> Any:
            # Some filters get Jinja's own context in front of their arguments.
            given = args[1:] if isinstance(args[0], _INTERNAL) else args
            self._charge(*given, *kwargs.values())
            self._check_operation(name, (*given, *kwargs.values()))
            return self._charged(run(*args, **kwargs))

        return metered

    def _check_operation(self, name: str, given: tuple[Any, ...]) -> None:
        """Refuse a filter or method of strings before it builds far more than it was given."""
        subject = given[0]
        if name == "replace" and len(given) > 2:
            self._check_size(_written_size(subject) + _occurrences(subject, given[1], given[2]))
        elif name == "join":
            glue = _written_size(given[1]) if len(given) > 1 else 0
            self._check_size(_written_size(subject) + glue * _length(subject))
        elif name == "indent" and isinstance(subject, str):
            width = max(map(_size_of, given[1:]), default=4)
            self._check_size(len(subject) + (subject.count("\n") + 1) * width)
        elif name not in _STRUCTURAL:
            self._check_size(_written_size(subject))

    def _charge(self, *values: object) -> None:
        for value in values:
            if isinstance(value, int | float) and _size_of(value) > _MAX_NUMBER:
                raise TemplateError(
                    f"[ChatTemplate] source: expected numbers up to {_MAX_NUMBER} as arguments, "
                    f"got {value}"
                )
            self.step(1 + _length(value) // _CHARS_PER_STEP)

    def _charged(self, result: Any) -> Any:
        self._check_size(_length(result))
        self.step(1 + _length(result) // _CHARS_PER_STEP)
        return result

    def _output(self, value: Any) -> Any:
        """Count what is written, also inside macros and blocks that are captured."""
        self._left.output -= _written_size(value)
        self._check_size(MAX_OUTPUT_CHARS - self._left.output)
        return value

    def _check_size(self, size: float) -> None:
        if size > MAX_OUTPUT_CHARS:
            raise TemplateError(
                f"[ChatTemplate] source: expected at most {MAX_OUTPUT_CHARS} characters or items, "
                f"got {size:.0f}"
            )

    def _check_bits(self, bits: float) -> None:
        if bits > _MAX_INTEGER_BITS:
            raise TemplateError(
                f"[ChatTemplate] source: expected integers of at most {_MAX_INTEGER_BITS} bits, "
                f"got {bits:.0f}"
            )


class _Meter(NodeTransformer):
    """Weaves the counting of steps into a template, and replaces ``~`` by a bounded version."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:
            node.test = nodes.And(_environment_call("step"), node.test)
        return self._count(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._count(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._count(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _environment_call("concatenate", *node.nodes)

    def _count(self, node: Any) -> nodes.Node:
        written = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        cost = nodes.Const(1 + written // _CHARS_PER_STEP)
        node.body.insert(0, nodes.ExprStmt(_environment_call("step", cost)))
        return node  # type: ignore[no-any-return]


def _environment_call(name: str, *args: nodes.Expr) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None)


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple | range | dict) else 0


def _written_size(value: object) -> int:
    """Characters that `value` takes when written, at least; stops counting where it is too much.

    A list may hold the same long text many times over: its length says nothing.
    """
    size, waiting = 0, [value]
    while waiting and size <= MAX_OUTPUT_CHARS:
        one = waiting.pop()
        size += len(one) if isinstance(one, str) else 1
        if isinstance(one, dict):
            waiting.extend((*one.keys(), *one.values()))
        elif isinstance(one, list | tuple | range):
            waiting.extend(one)
    return size


def _occurrences(text: object, old: object, new: object) -> int:
    """Characters that replacing `old` by `new` puts in."""
    return str(text).count(str(old)) * len(str(new)) if isinstance(text, str) else 0


def _size_of(number: object) -> float:
    return abs(number) if isinstance(number, int | float) else 0


def _raise_exception(message: object) -> NoReturn:
    raise TemplateError(f"[ChatTemplate] messages: refused by the template: {message}")


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: object,
    indent: int | None = None,
    *,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
    ensure_ascii: bool = False,
) -> str:
    """JSON as the models were trained on: not escaped for HTML, letters as they are."""
    if indent is not None and not 0 <= indent <= _MAX_JSON_INDENT:
        raise TemplateError(
            f"[ChatTemplate] source: expected a tojson indent of 0 to {_MAX_JSON_INDENT}, "
            f"got {indent}"
        )
    return json.dumps(
        value,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        ensure_ascii=ensure_ascii,
    )


def _indent(text: str, width: int = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's filter for a number of spaces; a text as width could multiply without bound."""
    lines = str(text).split("\n")
    pad = " " * int(width)
    return "\n".join(
        pad + line if (place or first) and (line or blank) else line
        for place, line in enumerate(lines)
    )
