"""Engines on the oracle, for tests: run until every request has ended, in the calling thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from leftfold.attaching import Delivery, by_choice
from leftfold.engine import Engine
from leftfold.events import Admit, EventLog, ExecutionPlan, SamplingParams
from leftfold.executor.base import Score
from leftfold.executor.oracle import OracleExecutor, expected_tokens
from leftfold.fsm import Config, Output

CONFIG = Config(num_pages=32, page_size=4, max_running=4, max_batch_tokens=16, max_model_len=64, vocab_size=1000)


def oracle(config: Config = CONFIG) -> OracleExecutor:
    assert config.vocab_size is not None
    return OracleExecutor(num_pages=config.num_pages, page_size=config.page_size, vocab_size=config.vocab_size)


class Spied:
    """An executor around another: `before(plan)` may look, block or raise; `after(result)` may exchange the result."""

    def __init__(
        self,
        before: Callable[[ExecutionPlan], None] | None = None,
        after: Callable[[Any], Any] | None = None,
        inner: Any = None,
    ) -> None:
        self.inner = oracle() if inner is None else inner
        self.before = before
        self.after = after
        self.plans: list[ExecutionPlan] = []
        self.resets = 0

    def execute(self, plan: ExecutionPlan) -> Any:
        self.plans.append(plan)
        if self.before is not None:
            self.before(plan)
        result = self.inner.execute(plan)
        return result if self.after is None else self.after(result)

    def reset(self) -> None:
        self.resets += 1
        self.inner.reset()


class Gated(Spied):
    """Executes a step only once the engine has planned as far ahead as it may, so that later steps are in flight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._waits = threading.Event()
        self.depths: list[int] = []

    def watch(self, made: Engine) -> Engine:
        """Follow `made`, whose executor this is."""
        patience = made._patience

        def spied() -> float | None:
            seconds = patience()
            if seconds != 0.0:
                self._waits.set()  # all is planned: the engine waits for a message
            return seconds

        close = made._worker.close

        def closing(timeout: float) -> bool:
            self._over = True
            return close(timeout)

        made._patience = spied  # type: ignore[method-assign]
        made._worker.close = closing  # type: ignore[method-assign]
        self._made, self._over = made, False
        return made

    def execute(self, plan: ExecutionPlan) -> Any:
        while not self._waits.wait(0.05) and not self._over:
            pass
        self.depths.append(len(self._made.state.in_flight) - 1)
        self._waits.clear()
        return super().execute(plan)

    def reset(self) -> None:
        self._waits.clear()
        super().reset()


class Listener:
    """Hears everything; stops the engine once `count` requests have ended, or when `until(output)` says so."""

    def __init__(self, count: int = 1, until: Callable[[Output], bool] | None = None) -> None:
        self.left = count
        self.until = until
        self.engine: Engine | None = None
        self.outputs: list[Output] = []
        self.acks: list[Any] = []
        self.scores: dict[str, list[Score]] = {}

    def __call__(self, effects: Delivery) -> None:
        self.acks += effects.acks
        beside = by_choice(effects.attachments)
        for output in effects.outputs:
            self.scores.setdefault(output.rid, []).extend(beside.pop((output.rid, output.epoch, output.choice), ()))
            self.outputs.append(output)
            self.left -= output.finish_reason is not None
            if self.left == 0 or (self.until is not None and self.until(output)):
                assert self.engine is not None
                self.engine.stop()
        assert not beside, "an attachment came without its output"

    def tokens(self, rid: str) -> list[int]:
        return [int(token) for output in self.outputs if output.rid == rid for token in output.tokens]

    def end(self, rid: str) -> Output:
        """The terminal output; there is exactly one."""
        (last,) = [output for output in self.outputs if output.rid == rid and output.finish_reason is not None]
        return last


def engine(
    listener: Listener, *, log: Any = None, executor: Any = None, config: Config = CONFIG, **options: Any
) -> Engine:
    """A started engine that tells `listener`."""
    options = {"model": "oracle", "backoff": 0.0, **options}
    made = Engine(
        log=EventLog.memory() if log is None else log,
        executor=Spied() if executor is None else executor,
        config=config,
        on_effects=listener,
        **options,
    )
    listener.engine = made
    made.start()
    return made


def gated(listener: Listener, depth: int, executor: Gated, **options: Any) -> Engine:
    """A started engine with up to `depth` steps planned ahead, each time."""
    return executor.watch(engine(listener, executor=executor, config=replace(CONFIG, pipeline_depth=depth), **options))


def admit(made: Engine, rid: str, prompt: Sequence[int] = (1, 2, 3, 4, 5), **fields: Any) -> None:
    """Submit a request; `max_tokens` and other parameters may stand among the fields."""
    params = SamplingParams(max_tokens=fields.pop("max_tokens", 6), seed=fields.pop("seed", 7))
    made.submit(Admit, rid=rid, prompt=list(prompt), params=params, **fields)


def alone(prompt: Sequence[int] = (1, 2, 3, 4, 5), max_tokens: int = 6) -> list[int]:
    """The tokens a request gets when nothing disturbs it."""
    assert CONFIG.vocab_size is not None
    return expected_tokens(list(prompt), max_tokens, CONFIG.vocab_size)
