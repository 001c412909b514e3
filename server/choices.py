"""What has come of one choice so far, position by position: nothing counts twice, nothing is left out."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from leftfold.events import Admit
from leftfold.executor.base import Score
from leftfold.server.wire import Output

DIVERGED = "diverged"


class Choice:
    """One request to the engine and what it has said of it, whoever of its processes it was that said it.

    `first`: absolute position of the first generated token. `admit`: what to ask an engine that knows nothing of it;
    None where only the log has it. `end`: the terminal output. `scores`: those that came, if they are wanted.
    """

    __slots__ = ("admit", "end", "first", "rid", "scores", "tokens", "version")

    def __init__(self, rid: str, first: int, admit: Admit | None = None) -> None:
        self.rid = rid
        self.first = first
        self.admit = admit
        self.tokens = array("i")
        self.scores: list[Score] = []
        self.end: Output | None = None
        self.version = ""

    @property
    def expected(self) -> int:
        """The position that comes next."""
        return self.first + len(self.tokens)

    def lacks(self, output: Output) -> bool:
        """Whether something before `output` has not come."""
        return self.end is None and output.position > self.expected

    def take(self, output: Output) -> Output | None:
        """What is new in `output`; None if nothing is. Tokens that were there must be the same, else it is the end."""
        if self.end is not None or output.position > self.expected:
            return None
        known = self.expected - output.position
        if (at := self._differs(output, known)) is not None:
            output = self._diverged(output, at)
        elif known > 0:
            output = replace(output, position=self.expected, tokens=output.tokens[known:])
        if self.tokens and output.scores:  # said again by an engine that computed its prompt again
            output = replace(output, scores=[score for score in output.scores if score.position >= self.expected])
        self.tokens.extend(output.tokens)
        self.scores.extend(output.scores)
        self.version = output.version or self.version
        if output.finish_reason is not None:
            self.end, self.admit = output, None
        return output if output.tokens or output.finish_reason is not None or output.scores else None

    def cut(self) -> None:
        """Nobody hears any more of it: it ends here, if it has not."""
        if self.end is None:
            self.end, self.admit = Output(self.rid, 0, self.expected, [], "abort", None, None, self.version), None

    def _differs(self, output: Output, known: int) -> int | None:
        """The first position at which a token that is known comes as another one."""
        start = output.position - self.first
        before: Sequence[int] = self.tokens[max(0, start) :]
        for offset, (old, new) in enumerate(zip(before, output.tokens[:known], strict=False)):
            if old != new:
                return output.position + offset
        return None

    def _diverged(self, output: Output, at: int) -> Output:
        text = (
            f"the engine was started again and drew another token at position {at} than was delivered; "
            "the answer cannot go on"
        )
        error = {"code": DIVERGED, "text": text}
        return Output(self.rid, output.choice, self.expected, [], "error", error, None, output.version)


__all__ = ["DIVERGED", "Choice"]
