"""What a fuzz run can find."""

from __future__ import annotations


class Violation(AssertionError):
    """Something that must never happen, as seen from outside the reducer. `kind`: a short name of the rule."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


def kind_of(fault: BaseException) -> str:
    """The name under which a fault counts as the same as another."""
    return fault.kind if isinstance(fault, Violation) else type(fault).__name__
