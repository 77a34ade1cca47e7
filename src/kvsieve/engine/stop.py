"""Stop strings in a stream: the text ends just before one, and no part of it is ever given out."""

from collections.abc import Sequence

from kvsieve.errors import ConfigError


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Normalise a request's `stop`: None is none, a bare string is one.

    ConfigError for anything but strings, and for an empty one (it would match at once).
    """
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, Sequence) or isinstance(stops, bytes):
        raise ConfigError(f"[stop] stop: expected a string or a list of strings, got {stop!r}")
    for text in stops:
        if not isinstance(text, str) or not text:
            raise ConfigError(f"[stop] stop: expected strings that are not empty, got {text!r}")
    return tuple(stops)


class StopMatcher:
    """Finds stop strings over any cutting of the text into pieces.

    The match that is complete first wins; of those that end at the same character, the longest.
    So the result depends on the text alone, not on the pieces it came in. Each character costs
    a step or two per stop string, however long (Knuth-Morris-Pratt).
    """

    def __init__(self, stops: str | Sequence[str] | None) -> None:
        self._stops = stop_strings(stops)
        self._borders = [_borders(stop) for stop in self._stops]
        # Per stop string: how many of its first characters end the text so far.
        self._matched = [0] * len(self._stops)
        self._held = ""
        self._found: str | None = None

    @property
    def found(self) -> str | None:
        """The stop string that ended the text, once one did."""
        return self._found

    def push(self, text: str) -> tuple[str, bool]:
        """Add `text`; return the text that is safe to give out, and whether a stop was found.

        What might be the beginning of a stop string is held back. After a stop, nothing more
        comes out.
        """
        if self._found is not None:
            return "", True
        pending = self._held + text
        for place, char in enumerate(text, start=len(self._held) + 1):
            found = self._advance(char)
            if found:
                self._found = pending[place - found : place]
                self._held = ""
                return pending[: place - found], True
        safe = len(pending) - max(self._matched, default=0)
        self._held = pending[safe:]
        return pending[:safe], False

    def flush(self) -> str:
        """End the text: return what was held back, which was no stop string after all."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, char: str) -> int:
        """Step every stop string by one character; the length of the longest completed, or 0."""
        found = 0
        for which, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[which]
            while matched and stop[matched] != char:
                matched = borders[matched - 1]
            if stop[matched] == char:
                matched += 1
            if matched == len(stop):
                found = max(found, matched)
            self._matched[which] = matched
        return found


def _borders(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper suffix that is also a prefix."""
    borders = [0] * len(stop)
    length = 0
    for place in range(1, len(stop)):
        while length and stop[length] != stop[place]:
            length = borders[length - 1]
        if stop[length] == stop[place]:
            length += 1
        borders[place] = length
    return borders
