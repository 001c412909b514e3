"""Why a request did not run, or had to give way: collected only when somebody asks."""

from __future__ import annotations

from typing import NamedTuple


class Reason(NamedTuple):
    """One cause, with its numbers. `kind`: one of

    `gate`, `slots`, `budget`, `pages`, `order` (behind one that does not fit), `deadline`, `apart` (a suspect is
    to run alone) for requests that wait; `victim`, `given_way`, `held_back`, `no_page` for rows. `needed`,
    `available`: of what the kind counts.
    """

    rid: str
    epoch: int
    choice: int
    kind: str
    needed: int
    available: int
    text: str
