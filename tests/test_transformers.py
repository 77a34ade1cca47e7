"""The public name `kvsieve.transformers`, with and without the packages behind it."""

import importlib.util
import subprocess
import sys

import pytest

from tests.contract.project import ROOT

WITHOUT = "import sys; sys.modules['torch'] = None; "
"""What an environment without torch looks like to `import`."""

INSTALLED = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


def python(script: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.strip()


@pytest.mark.parametrize(
    "use", ["import kvsieve.transformers", "import kvsieve; kvsieve.transformers.sparse"]
)
def test_a_missing_package_is_named_with_its_extra(use: str) -> None:
    for kind in ("kvsieve.errors.KvsieveError", "ImportError"):
        script = f"{WITHOUT}import kvsieve.errors\ntry: {use}\nexcept {kind} as error: print(error)"
        assert python(script).startswith(
            "[kvsieve.transformers] packages: expected torch and transformers 5.4 or newer "
            "(pip install 'kvsieve[transformers]'), got "
        )


def test_an_old_release_is_refused() -> None:
    script = (
        "import sys; from types import SimpleNamespace as Module; "
        "sys.modules |= {'torch': Module(__version__='2.6'), "
        "'transformers': Module(__version__='4.57.6')}\n"
        "try: import kvsieve.transformers\nexcept ImportError as error: print(error)"
    )
    assert python(script) == (
        "[kvsieve.transformers] packages: expected torch and transformers 5.4 or newer "
        "(pip install 'kvsieve[transformers]'), got transformers 4.57.6"
    )


def test_the_package_itself_imports_neither() -> None:
    script = (
        "import sys, kvsieve; kvsieve.LLM, kvsieve.attend; import kvsieve.cli.app; "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert python(script) == "set()"


@pytest.mark.skipif(not INSTALLED, reason="make test-transformers installs torch, transformers")
def test_importing_it_registers_the_attention() -> None:
    script = (
        "import kvsieve; names = kvsieve.transformers.__all__; "
        "from transformers import AttentionInterface; "
        "print('kvsieve' in AttentionInterface(), 'KVSieveCache' in names)"
    )
    assert python(script) == "True True"
