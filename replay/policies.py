"""Policies of a user's own, given as `module:function`: registered by name before a state is made or folded with them.

A log may name such a policy, but only whoever runs the program says that it may be imported.
"""

from __future__ import annotations

from importlib import import_module

from leftfold.fsm import POLICIES, Policy, register
from leftfold.fsm.request import Request


class PolicyError(ValueError):
    """A policy that cannot be had, or that fails on a request; the message says why."""


def load(name: str) -> str:
    """Make `name` known if it is a `module:function`, and give it back. Raises `PolicyError`.

    The function takes a request (see `fsm/request.py`) and returns integers, smallest first; it must depend on nothing
    that changes while a request lives. Or the name is that of a `leftfold.fsm.Policy`.
    """
    if name in POLICIES:
        return name
    module, colon, attribute = name.partition(":")
    if not colon:
        raise PolicyError(f"policy {name!r} is none of {', '.join(POLICIES)}, and no module:function")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise PolicyError(f"policy {name!r} cannot be imported: {error}") from error
    if isinstance(found, Policy):
        register(name, found)
    elif callable(found):

        def rank(request: Request) -> tuple[int, ...]:
            try:
                return (*(int(value) for value in found(request)), request.arrival)
            except Exception as error:  # somebody else's code: whatever it raises is told as its own
                raise PolicyError(f"policy {name!r} failed on a request: {type(error).__name__}: {error}") from error

        register(name, Policy(rank))
    else:
        raise PolicyError(f"policy {name!r} is a {type(found).__name__}, not a function or a Policy")
    return name
