"""Results of a sweep in one SQLite file: each row is on disk as soon as it is known.

A file holds results of one model and one version, and says which: a sweep with another is refused.
"""

import json
import sqlite3
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from kvsieve.errors import ConfigError

FORMAT = "1"
"""Of the tables below."""

_TABLES = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS results (
    key TEXT PRIMARY KEY,      -- everything that decides the row, as JSON
    task TEXT NOT NULL,
    attn TEXT NOT NULL,
    setting TEXT NOT NULL,
    length INTEGER NOT NULL,
    row TEXT NOT NULL,         -- the row, as JSON
    seconds REAL NOT NULL
);
"""


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What all results of a file have in common."""

    model: str
    fingerprint: str
    version: str
    cache_type: str

    def __str__(self) -> str:
        return (
            f"model {self.model} ({self.fingerprint}), cache {self.cache_type}, "
            f"kvsieve {self.version}"
        )


class ResultStore:
    """The file, opened; a context manager. Made by `create` to add rows, by `read` to look."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path

    @classmethod
    def create(cls, path: Path, identity: Identity) -> "ResultStore":
        """Open `path` for results of `identity`, or make it.

        ConfigError: it holds results of another model, cache type or version, or is no such file.
        """
        if not path.parent.is_dir():
            raise ConfigError(f"[results] path: expected a folder to write in, got {path.parent}")
        store = cls(_connected(path), path)
        try:
            store._connection.executescript(_TABLES)
            store._adopt(identity)
        except sqlite3.Error as error:
            store.close()
            raise _not_ours(path, error) from error
        except BaseException:
            store.close()
            raise
        return store

    @classmethod
    def read(cls, path: Path) -> "ResultStore":
        """Open an existing file; ConfigError if there is none, or it is not one of ours."""
        if not path.is_file():
            raise ConfigError(f"[results] path: expected a file that a sweep wrote, got {path}")
        store = cls(_connected(path), path)
        try:
            store.identity  # noqa: B018
        except BaseException:
            store.close()
            raise
        return store

    @property
    def identity(self) -> Identity:
        """Model and version of the results."""
        try:
            about = dict(self._connection.execute("SELECT name, value FROM about"))
            if about.pop("format") != FORMAT:
                raise ConfigError(
                    f"[results] {self._path}: expected format {FORMAT}, got another version's file"
                )
            return Identity(**about)
        except (sqlite3.Error, KeyError, TypeError) as error:
            raise _not_ours(self._path, error) from error

    def __enter__(self) -> "ResultStore":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; what was added stays."""
        self._connection.close()

    def has(self, key: str) -> bool:
        """Whether the row of `key` is there."""
        found = self._connection.execute("SELECT 1 FROM results WHERE key = ?", (key,))
        return found.fetchone() is not None

    def add(self, key: str, row: dict[str, Any], *, task: str, seconds: float) -> None:
        """Put a row on disk; it is there when this returns, whatever happens then."""
        with self._connection:
            self._connection.execute(
                "INSERT INTO results VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    key,
                    task,
                    row["attn"],
                    row["setting"],
                    row["length"],
                    json.dumps(row),
                    round(seconds, 3),
                ),
            )

    def rows(self, task: str) -> list[dict[str, Any]]:
        """Rows of a task in the order in which they were added."""
        found = self._connection.execute(
            "SELECT row FROM results WHERE task = ? ORDER BY rowid", (task,)
        )
        return [json.loads(row) for (row,) in found]

    def tasks(self) -> list[str]:
        """Tasks that have rows."""
        found = self._connection.execute("SELECT DISTINCT task FROM results ORDER BY task")
        return [task for (task,) in found]

    def _adopt(self, identity: Identity) -> None:
        """Say whose results these are, or find that they are somebody else's."""
        if self._connection.execute("SELECT 1 FROM about").fetchone() is None:
            with self._connection:
                about = {**vars(identity), "format": FORMAT}
                self._connection.executemany("INSERT INTO about VALUES (?, ?)", about.items())
        elif self.identity != identity:
            raise ConfigError(
                f"[results] {self._path}: expected results of {identity}, got those of "
                f"{self.identity}: results never mix, choose another file"
            )


def _connected(path: Path) -> sqlite3.Connection:
    try:
        return sqlite3.connect(path)
    except sqlite3.Error as error:
        raise _not_ours(path, error) from error


def _not_ours(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"[results] {path}: expected a file that `kvsieve eval sweep` wrote, got one that "
        f"reads as {type(error).__name__}: {error}"
    )
