"""Token ids to text as they come: a character split over tokens waits until it is whole."""

import codecs

from kvsieve.engine.no_vocabulary import AnyTokenizer


class Detokenizer:
    """Text of one growing sequence. What `push` and `flush` return joins to `Tokenizer.decode`.

    Bytes that cannot become a character give U+FFFD at once; nothing else is held back.
    """

    def __init__(self, tokenizer: AnyTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Return the characters that `token_id` completes, often none or several."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """End the text: U+FFFD for a character that stayed incomplete, else nothing."""
        return self._decoder.decode(b"", final=True)
