"""The oracle with the faults of a device: steps that leave rubbish behind, memory that survives a restart."""

from __future__ import annotations

from typing import Any
from zlib import crc32

from leftfold.events import Control, ExecutionPlan
from leftfold.executor.base import Result
from leftfold.executor.oracle import OracleExecutor

RUBBISH = -7


class Device(OracleExecutor):
    """An oracle that can be told to fail. `refuses`: operations of the next step fail, and change nothing."""

    refuses = False

    def _control(self, control: Control) -> tuple[int, Any, str | None]:
        if self.refuses:
            return control.op, None, "planted"
        return super()._control(control)

    def fail(self, plan: ExecutionPlan) -> Result:
        """Fail a step halfway: rubbish stands where its rows write, no row has advanced."""
        self.fail_next("planted")
        result = self.execute(plan)
        for row in plan.rows:
            for position in range(row.start, row.start + row.length):
                self._memory[row.pages[position // self.page_size]][position % self.page_size] = RUBBISH
        return result

    def restart(self, keep: bool, version: str) -> None:
        """Forget the rows and, unless `keep`, the content of all pages; load the weights of `version`."""
        memory = self._memory
        self.reset()
        self._weights = crc32(version.encode())
        if keep:
            self._memory = memory
