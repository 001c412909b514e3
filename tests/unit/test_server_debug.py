"""`/debug` on a server: the page for everybody, the log for the admin key alone, answered by a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from leftfold.events import EventLog
from leftfold.server.control import CONTROL_PATHS
from leftfold.server.debug import DEBUG_PAGE, DEBUG_PATHS, QUESTIONS
from tests.instant_engine import App
from tests.logs import record

ADMIN = {"authorization": "Bearer admin"}


@pytest.fixture
def app(tmp_path: Path) -> Iterator[App]:
    made = App(tmp_path / "server", api_key="user", admin_api_key="admin")
    with EventLog.open(tmp_path / "log") as log:
        record(log)
    made.state.log_folder = tmp_path / "log"
    yield made
    made.app.state.debugger.stop()


def test_the_page_needs_no_key_and_holds_nothing(app: App) -> None:
    page = app.request("GET", "/debug/")
    assert page.status_code == 200 and "script-src 'self'" in page.headers["content-security-policy"]
    assert app.request("GET", "/debug/app.js").headers["content-type"].startswith("text/javascript")
    assert app.request("GET", "/debug/nothing.js", headers=ADMIN).status_code == 404
    assert all(path.startswith("/debug") for path in DEBUG_PAGE) and not DEBUG_PAGE & (DEBUG_PATHS | CONTROL_PATHS)


def test_the_log_is_for_the_admin_key(app: App) -> None:
    for path in DEBUG_PATHS:
        assert app.request("GET", path).status_code == 401
        assert app.request("GET", path, headers={"authorization": "Bearer user"}).status_code == 401
    foreign = {**ADMIN, "origin": "http://evil.example"}
    assert app.request("GET", "/debug/api/meta", headers=foreign).status_code == 403


def test_it_answers_from_a_process_of_its_own_that_can_be_begun_anew(app: App) -> None:
    found = app.request("GET", "/debug/api/moment?seq=3", headers=ADMIN)
    assert found.status_code in (200, 404), found.text
    meta = app.request("GET", "/debug/api/meta", headers=ADMIN).json()
    assert meta["name"] == "log" and meta["first"] == 1
    first = app.app.state.debugger._process.pid
    assert app.request("POST", "/debug/api/again", headers=ADMIN).json() == {"ok": True}
    assert app.request("POST", "/debug/api/worlds", headers=ADMIN, content=b"[]").status_code == 400
    assert app.app.state.debugger._process.pid != first


def test_without_an_admin_key_or_a_log_it_says_so(tmp_path: Path) -> None:
    open_to_all = App(tmp_path / "a")
    assert open_to_all.request("GET", "/debug/api/meta").status_code == 403
    without = App(tmp_path / "b", admin_api_key="admin")
    assert without.request("GET", "/debug/api/meta", headers=ADMIN).status_code == 404


def test_every_question_of_the_page_has_its_path() -> None:
    from leftfold.replay.ui.api import Api

    log = EventLog.memory()
    record(log)
    assert set(Api(log, "x")._gets) == set(QUESTIONS)
