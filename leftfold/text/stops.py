"""Stop strings over a stream of text: what may be shown now, what must wait, and where the text ends."""

from __future__ import annotations

from collections.abc import Sequence


def _failure_table(pattern: str) -> list[int]:
    """For each length of a matched prefix, the length of its longest proper border (Knuth, Morris, Pratt 1977)."""
    table = [0] * (len(pattern) + 1)
    border = 0
    for i in range(1, len(pattern)):
        while border and pattern[i] != pattern[border]:
            border = table[border]
        border += pattern[i] == pattern[border]
        table[i + 1] = border
    return table


class StopMatcher:
    """Feeds text character by character, so that the result is the same however the text was cut.

    The first stop string to be complete ends the text; of several that are complete at the same character, the
    longest. The text ends before it. `push` returns what can be shown: everything but the longest suffix that may
    still become a stop string. A character costs O(1) amortised per stop string.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        if not all(stops):
            raise ValueError("an empty stop string would end every text at once; leave it out")
        self._patterns = [(stop, _failure_table(stop)) for stop in dict.fromkeys(stops)]
        self._matched = [0] * len(self._patterns)
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """The text that may be shown after `text` has arrived; `stopped` names the stop string that was met."""
        if self.stopped is not None:
            return ""
        if not self._patterns:
            return text
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            self._advance(char)
            if self.stopped is not None:
                self._held = ""
                return pending[: end - len(self.stopped)]
        keep = len(pending) - max(self._matched)
        self._held = pending[keep:]
        return pending[:keep]

    def finish(self) -> str:
        """The text that was held back, now that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> None:
        for i, (pattern, failure) in enumerate(self._patterns):
            length = self._matched[i]
            while length and pattern[length] != char:
                length = failure[length]
            length += pattern[length] == char
            if length == len(pattern):
                if self.stopped is None or length > len(self.stopped):
                    self.stopped = pattern
                length = failure[length]
            self._matched[i] = length
