"""Every ten seconds one line in the log: throughput, running, waiting, KV usage, prefix cache hits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from leftfold.server.client import EngineClient
from leftfold.server.group import EngineGone

_log = logging.getLogger("leftfold.server")
INTERVAL_SECONDS = 10.0


async def report_throughput(engine: EngineClient, interval: float = INTERVAL_SECONDS) -> None:
    """Logs a line per interval in which something happened, until cancelled or the engine is gone."""
    before: Mapping[str, Any] = {}
    while True:
        await asyncio.sleep(interval if before else 0)
        try:
            now = await engine.stats()
        except TimeoutError:
            _log.warning("the engine does not answer")
            continue
        except EngineGone:
            return
        if before and (now.get("steps") != before.get("steps") or now.get("live")):
            _log.info(line(before, now, interval))
        before = now


def line(before: Mapping[str, Any], now: Mapping[str, Any], seconds: float) -> str:
    """The line for what changed between two readings of the engine's statistics."""

    def gained(key: str) -> int:
        return int(now.get(key, 0)) - int(before.get(key, 0))

    pages, held = int(now.get("num_pages", 0)), int(now.get("pages_held", 0))
    queries, hits = gained("prefix_queries"), gained("prefix_hits")
    return (
        f"prompt throughput {gained('prompt_tokens') / seconds:.1f} tokens/s, "
        f"generation throughput {gained('generation_tokens') / seconds:.1f} tokens/s, "
        f"running {now.get('running', 0)}, waiting {now.get('waiting', 0)}, "
        f"KV cache usage {held / pages if pages else 0:.1%}, "
        f"prefix cache hit rate {hits / queries if queries else 0:.1%}"
    )
