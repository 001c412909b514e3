"""64 concurrent chats, a third of whose clients hang up: the others get what they get alone, all is given back."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.e2e.chats import COUNT, all_at_once, one_by_one
from tests.e2e.servers import ServerProcess
from tests.tiny_folder import write_tokenizer


def test_a_third_of_64_clients_hangs_up(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, {})
    with ServerProcess.toy(folder, kv_tokens=8192, disable_access_log=True) as server:
        server.wait_until_ready()
        answers = asyncio.run(all_at_once(server.url, tokens=80))
        gauges = server.wait_until_idle()
        assert gauges['leftfold:kv_pages{use="free"}'] + gauges['leftfold:kv_pages{use="cached"}'] == 512
        staying = [i for i in range(COUNT) if i % 3]
        alone = asyncio.run(one_by_one(server.url, staying, tokens=80))
        assert {i: answers[i] for i in staying} == alone
        assert all(len(alone[i]) == 80 + i for i in staying)
        assert gauges['leftfold:request_success_total{finished_reason="length"}'] >= len(staying)  # some hang up late
        for i in range(3, COUNT, 6):  # what those who hung up had heard is the beginning of the same answer
            assert 0 < len(answers[i]) < 80 + i
        assert "Traceback" not in server.stderr
