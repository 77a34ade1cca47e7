"""Who may import whom: the layers, and the one place of each outside package."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.project import ROOT, project_files

SOURCE = ROOT / "src"

FENCES = {
    "gguf": "kvsieve.models.weights",
    "tokenizers": "kvsieve.engine.bpe",
    "huggingface_hub": "kvsieve.engine.hub",
    "jinja2": "kvsieve.engine.template_sandbox",
    "llguidance": "kvsieve.engine.constraint",
    "psutil": "kvsieve.engine.memory",
    "typer": "kvsieve.cli",
    "rich": "kvsieve.cli",
    "fastapi": "kvsieve.server",
    "starlette": "kvsieve.server",
    "uvicorn": "kvsieve.server",
    "pydantic": "kvsieve.server",
    "pydantic_core": "kvsieve.server",
    "prometheus_client": "kvsieve.server",
    "matplotlib": "kvsieve.plotting",
    "torch": "kvsieve.integrations.transformers",
    "transformers": "kvsieve.integrations.transformers",
    "kvsieve._native": "kvsieve.kernels.native",
}
"""Each outside package, and the only module or subpackage that may import it."""

EVERYWHERE = {"numpy", "kvsieve"}


def test_imports_point_down() -> None:
    """import-linter reads the layers from .importlinter."""
    script = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr


def modules() -> list[tuple[str, Path]]:
    """Dotted name and path of every module of the package."""
    found = []
    for path in project_files(".py"):
        if path.is_relative_to(SOURCE):
            parts = path.relative_to(SOURCE).with_suffix("").parts
            found.append((".".join(parts).removesuffix(".__init__"), path))
    return found


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Every dotted name a module imports, at any depth, ``import_module("x")`` included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            name = node.args[0]
            if called in {"import_module", "__import__"} and isinstance(name, ast.Constant):
                yield str(name.value)


def fence_breaches(module: str, source: str) -> list[str]:
    breaches = []
    for name in imported_names(ast.parse(source)):
        top = "kvsieve._native" if name.startswith("kvsieve._native") else name.split(".")[0]
        if top in EVERYWHERE or top in sys.stdlib_module_names:
            continue
        place = FENCES.get(top)
        if place is None:
            breaches.append(f"{module} imports {top}, which has no place in FENCES")
        elif module != place and not module.startswith(f"{place}."):
            breaches.append(f"{module} imports {top}, which only {place} may")
    return breaches


def test_each_outside_package_has_one_place() -> None:
    breaches = [
        breach
        for module, path in modules()
        for breach in fence_breaches(module, path.read_text(encoding="utf-8"))
    ]
    assert not breaches, "\n".join(breaches)


@pytest.mark.parametrize(
    "source",
    [
        "import jinja2",
        "from gguf.quants import dequantize",
        "def f():\n    import rich.table",
        "from kvsieve import _native",
        "import importlib\nimportlib.import_module('typer')",
        "import torch",
    ],
)
def test_a_breach_is_seen(source: str) -> None:
    assert len(fence_breaches("kvsieve.attention.masks", source)) == 1


def test_a_package_is_welcome_in_its_place() -> None:
    assert not fence_breaches("kvsieve.cli.app", "import typer")
    assert not fence_breaches("kvsieve.models.weights", "from gguf.quants import dequantize")


def test_importing_the_package_loads_no_numpy_and_nothing_of_ours() -> None:
    script = (
        "import sys, kvsieve; "
        "print([m for m in sys.modules if m.startswith(('kvsieve.', 'numpy'))])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={"PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "['kvsieve.version']"
