"""What stands in for a tokenizer where a model file has none: token ids in, token ids out."""

from collections.abc import Iterable
from typing import NoReturn, TypeAlias

from kvsieve.engine.folder_tokenizer import folder_chat_template, folder_tokenizer, has_tokenizer
from kvsieve.engine.tokenizer import Tokenizer
from kvsieve.engine.vocabulary import has_vocabulary
from kvsieve.errors import ConfigError
from kvsieve.models.checkpoint import Checkpoint
from kvsieve.models.config import ModelConfig
from kvsieve.models.model_file import ModelFile


class NoVocabulary:
    """The part of `Tokenizer` that needs no texts; whatever needs one raises ConfigError.

    Tokens add nothing to a reply's text, and none ends it but the one that the file may name.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    @property
    def vocab_size(self) -> int:
        """Number of tokens; ids go from 0 to one less."""
        return self._config.vocab_size

    @property
    def bos_id(self) -> int | None:
        """The token that the file says a prompt begins with, if any."""
        return self._config.bos_id

    @property
    def eos_id(self) -> int | None:
        """The end token the file names, if any."""
        return self._config.eos_id

    @property
    def eos_ids(self) -> frozenset[int]:
        """The same as a set."""
        return frozenset() if self.eos_id is None else frozenset({self.eos_id})

    def token_bytes(self, token_id: int, *, special: bool = False) -> bytes:
        """No bytes, whatever the token."""
        return b""

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = True
    ) -> NoReturn:
        """Raise ConfigError: text has no ids here."""
        raise self.error("prompt", got="text")

    def decode(self, ids: Iterable[int], *, special: bool = False) -> NoReturn:
        """Raise ConfigError: ids have no text here."""
        raise self.error("decode", got="a request for text")

    def token_text(self, token_id: int) -> NoReturn:
        """Raise ConfigError, likewise."""
        self.decode([token_id])

    def error(self, argument: str, *, got: str) -> ConfigError:
        """What to raise where text was given or asked for."""
        return ConfigError(
            f"[LLM] {argument}: expected token ids and no text, because the model file of "
            f"{self._config.name} has no vocabulary, got {got}"
        )


AnyTokenizer: TypeAlias = Tokenizer | NoVocabulary


def tokenizer_of(file: ModelFile, config: ModelConfig) -> AnyTokenizer:
    """The tokenizer of a model file, or what stands in for one."""
    if isinstance(file, Checkpoint):
        if not has_tokenizer(file.path):
            return NoVocabulary(config)
        ends = frozenset() if config.eos_id is None else frozenset({config.eos_id})
        return folder_tokenizer(file.path, vocab_size=config.vocab_size, eos_ids=ends)
    if not has_vocabulary(file.metadata):
        return NoVocabulary(config)
    return Tokenizer.from_metadata(file.metadata)


def chat_template_of(file: ModelFile) -> str | None:
    """The chat template that comes with a model file."""
    if isinstance(file, Checkpoint):
        return folder_chat_template(file.path)
    source = file.metadata.get("tokenizer.chat_template")
    return source if isinstance(source, str) else None
