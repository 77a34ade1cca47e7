"""Options that shape a reply beyond how a token is drawn: repetition, and what it has to match."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from kvsieve.cli.options import integer, option, real
from kvsieve.errors import ConfigError

if TYPE_CHECKING:
    from kvsieve.engine.constraint import Constraint

_REPLY = "Shape of the reply"


@dataclass(frozen=True, kw_only=True)
class ReplyOptions:
    """Penalties on what was said before, and a schema."""

    repeat_penalty: Annotated[
        float,
        real(
            "--repeat-penalty",
            panel=_REPLY,
            help="Make tokens that were said less likely (above 1) or more (below); 1 is off.",
        ),
    ] = 1.0
    repeat_last_n: Annotated[
        int,
        integer(
            "--repeat-last-n",
            panel=_REPLY,
            help="Tokens, the prompt's included, that penalties look back on; -1: all, 0: none.",
        ),
    ] = 64
    presence_penalty: Annotated[
        float,
        real(
            "--presence-penalty",
            panel=_REPLY,
            help="Taken from the logit of every token that was said; 0 is off.",
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        real(
            "--frequency-penalty",
            panel=_REPLY,
            help="Taken from a token's logit once for each time it was said; 0 is off.",
        ),
    ] = 0.0
    json_schema: Annotated[
        str | None,
        option(
            "-j",
            "--json-schema",
            panel=_REPLY,
            metavar="SCHEMA",
            show_default=False,
            help="Reply with JSON that fits this schema; {} allows any JSON.",
        ),
    ] = None
    json_schema_file: Annotated[
        Path | None,
        option(
            "-jf",
            "--json-schema-file",
            panel=_REPLY,
            metavar="FILE",
            show_default=False,
            help="The same, with the schema in a file.",
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.json_schema is not None and self.json_schema_file is not None:
            raise ConfigError(
                "-j/--json-schema: expected it or -jf/--json-schema-file, got both of them"
            )

    @property
    def constraint(self) -> "Constraint | None":
        """What the reply has to match; ConfigError if it cannot be enforced or read."""
        from kvsieve.engine.constraint import Constraint

        if self.json_schema is not None:
            return Constraint.json_schema(self.json_schema)
        if self.json_schema_file is None:
            return None
        try:
            text = self.json_schema_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"-jf/--json-schema-file: expected a text file, got {error}"
            ) from None
        return Constraint.json_schema(text)
