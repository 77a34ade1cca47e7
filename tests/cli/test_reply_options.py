import json
from pathlib import Path

import pytest

from tests.cli.conftest import Run

SCHEMA = json.dumps({"type": "array", "items": {"enum": [4, 7]}, "minItems": 2, "maxItems": 2})


def generated(on_tiny: Run, *arguments: str) -> dict:
    ran = on_tiny("generate", "--json", "-p", "the key", "-n", "30", *arguments)
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_a_reply_fits_the_schema(on_tiny: Run, tmp_path: Path) -> None:
    result = generated(on_tiny, "-j", SCHEMA)
    value = json.loads(result["text"])
    assert len(value) == 2
    assert set(value) <= {4, 7}
    assert result["finish_reason"] == "stop"
    path = tmp_path / "schema.json"
    path.write_text(SCHEMA)
    assert generated(on_tiny, "--json-schema-file", str(path))["text"] == result["text"]


def test_penalties_change_what_is_said(on_tiny: Run) -> None:
    plain = generated(on_tiny, "--ignore-eos")["token_ids"]
    for option in ("--presence-penalty", "--frequency-penalty"):
        token_ids = generated(on_tiny, "--ignore-eos", "--repeat-last-n", "-1", option, "100")
        # At so high a price no token is said twice.
        assert len(set(token_ids["token_ids"])) == 30
    assert len(set(plain)) < 30
    assert generated(on_tiny, "--ignore-eos", "--repeat-penalty", "9")["token_ids"] != plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repeat-penalty", "0"], "repeat_penalty: expected a number of at least 0.001"),
        (["--repeat-last-n", "-2"], "repeat_last_n: expected"),
        (["--presence-penalty", "nan"], "presence_penalty: expected"),
        (["-j", '{"uniqueItems": true}'], "uniqueItems"),
        (["-j", "{"], "expected a JSON object"),
        (["-j", "{}", "-jf", "x"], "got both"),
        (["-jf", "none.json"], "No such file"),
    ],
)
def test_what_cannot_be_done_is_one_line(on_tiny: Run, arguments: list[str], message: str) -> None:
    ran = on_tiny("generate", "-p", "x", *arguments)
    assert ran.code == 2
    assert message in ran.err
    assert len(ran.err.strip().splitlines()) == 1
