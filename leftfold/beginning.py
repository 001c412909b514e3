"""Where an engine begins: the fold of what its log holds."""

from __future__ import annotations

import logging

from leftfold.errors import ConfigurationError
from leftfold.identity import check_model
from leftfold.keeping import Keeper
from leftfold.recall import Memory
from leftfold.replay.errors import ReducerFault, ReplayError, UnknownPolicy
from leftfold.replay.fold import Fold
from leftfold.results import Results

logger = logging.getLogger("leftfold.engine")


def folded(log: Keeper, model: str, memory: Memory | None, results: Results) -> tuple[Fold, str]:
    """The fold of what `log` holds, and why nothing can go on from there, "" if it can.

    `memory` takes what the fold says, `results` what it tells of losses. Raises ConfigurationError for a log of another
    model or other laws.
    """
    fold = Fold()
    try:
        fold, records = log.begin()
        if fold.last is not None:
            check_model(fold.last, model)
        if memory is not None and fold.state is not None:
            memory.begin(fold.state)
        for record in records:
            check_model(record.event, model)
            results.before(fold.state, record.event)
            effects = fold.take(record.seq, record.event)
            results.after(fold.state, record.event)
            if memory is not None:
                memory.take(effects)
    except ReducerFault as fault:
        why = f"{fault}; the log is kept as it is: move it away, or replay it with a version that folds it"
        logger.error("refusing all work: %s", why)
        return fold, why
    except UnknownPolicy as error:
        raise ConfigurationError(f"the log cannot be folded: {error}; or choose another --log-dir") from error
    except ReplayError as error:
        raise ConfigurationError(f"the log cannot be folded: {error}; choose another --log-dir") from error
    return fold, ""


__all__ = ["folded"]
