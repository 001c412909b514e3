"""The debugger in a real browser: load, scrub, jump, search, compare, what if. `make test-browser` runs it.

Needs the extra `browser` (Playwright for Python) and a Chromium that is installed (Debian's `chromium`, or
LEFTFOLD_CHROMIUM). Without them the tests are skipped, so `make test` needs neither.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from leftfold.events import EventLog
from leftfold.replay.ui.api import Api
from leftfold.replay.ui.http import Server
from tests.unit.test_replay_views import simulated

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the extra browser")
NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("LEFTFOLD_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed"),
    pytest.mark.skipif("LEFTFOLD_BROWSER" not in os.environ, reason="make test-browser sets LEFTFOLD_BROWSER"),
]
PATIENCE = 60


@pytest.fixture(scope="module")
def log() -> EventLog:
    return simulated(24)


@pytest.fixture
def server(log: EventLog) -> Iterator[Server]:
    api = Api(log, "made <b>up</b>")
    with Server(api) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        api.start().join(PATIENCE)
        yield made
        made.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as play:
        made = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(params=["light", "dark"])
def page(request: pytest.FixtureRequest, browser: Any, server: Server) -> Iterator[Any]:
    """The page, loaded; whatever its scripts complain of fails the test."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme=request.param)
    made = context.new_page()
    faults: list[str] = []
    made.on("pageerror", lambda error: faults.append(str(error)))
    made.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    made.goto(server.url)
    until(made, "leftfold.moment && leftfold.lanes && leftfold.meta.done")
    yield made
    context.close()
    assert faults == []


def until(page: Any, wanted: str) -> None:
    """Wait for an expression of the page; its policy forbids Playwright's own way of waiting."""
    end = time.monotonic() + PATIENCE
    while not page.evaluate(f"Boolean({wanted})"):
        assert time.monotonic() < end, f"never: {wanted}"
        page.wait_for_timeout(20)


def at(page: Any, seq: int) -> None:
    until(page, f"leftfold.seq === {seq} && leftfold.moment.seq === {seq}")


def painted(page: Any, canvas: str) -> int:
    """How many colours a canvas shows."""
    count: int = page.evaluate(
        """(id) => { const it = document.getElementById(id);
        const data = it.getContext("2d").getImageData(0, 0, it.width, it.height).data, seen = new Set();
        for (let at = 0; at < data.length; at += 4) seen.add((data[at] << 16) | (data[at + 1] << 8) | data[at + 2]);
        return seen.size; }""", canvas,
    )  # fmt: skip
    return count


def test_it_loads_and_paints_and_a_name_is_text(page: Any) -> None:
    at(page, 1)
    assert page.locator("#name").text_content() == "made <b>up</b>" and page.locator("#name b").count() == 0
    page.keyboard.press("Shift+ArrowRight")
    page.wait_for_timeout(100)
    assert min(painted(page, name) for name in ("strip", "lanes", "pages")) > 3
    root = "document.documentElement"
    assert page.evaluate(f"{root}.scrollWidth <= innerWidth && {root}.scrollHeight <= innerHeight")


def test_scrubbing_stepping_and_playing(page: Any, log: EventLog) -> None:
    box = page.locator("#strip").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 30, steps=5)
    page.mouse.up()
    middle = page.evaluate("leftfold.seq")
    assert abs(middle - len(log) / 2) < len(log) * 0.02
    at(page, middle)
    page.keyboard.press("ArrowRight")
    at(page, middle + 1)
    page.keyboard.press("ArrowLeft")
    at(page, middle)
    page.keyboard.press("End")
    at(page, len(log))
    page.keyboard.press("Home")
    at(page, 1)
    page.select_option("#speed", "30")
    page.keyboard.press("Escape")
    page.locator("#play").click()
    until(page, "leftfold.seq > 4")
    page.keyboard.press("Space")
    assert page.evaluate("leftfold.playing") is False


def test_jumping_to_a_record_a_time_and_a_decision(page: Any, log: EventLog) -> None:
    page.keyboard.press("g")
    page.keyboard.type("120")
    page.keyboard.press("Enter")
    at(page, 120)
    assert page.locator("#panel pre").text_content()
    page.keyboard.press("]")
    until(page, "leftfold.seq > 120 && leftfold.moment.seq === leftfold.seq")
    assert page.locator("#type").text_content() == "tick"
    page.keyboard.press("g")
    page.keyboard.type("0.01s")
    page.keyboard.press("Enter")
    until(page, "leftfold.seq < 120 && leftfold.moment.t <= 10000")


def test_finding_a_request_explains_it(page: Any) -> None:
    page.keyboard.press("/")
    page.keyboard.type("r17")
    until(page, "document.querySelectorAll('#found [data-life]').length === 1")
    page.keyboard.press("Enter")
    until(page, "leftfold.about?.rid === 'r17' && leftfold.tab === 'why'")
    for _ in range(3):
        before = page.evaluate("leftfold.seq")
        page.keyboard.press("n")
        until(page, f"leftfold.seq > {before} && leftfold.moment.seq === leftfold.seq")
    until(page, "document.querySelector('#panel').textContent.includes('waited')")


def test_two_cursors_are_compared(page: Any) -> None:
    page.evaluate("leftfold.go(60)")
    at(page, 60)
    page.keyboard.press("b")
    until(page, "leftfold.compared?.same")
    page.keyboard.press("Shift+ArrowRight")
    until(page, "leftfold.compared && !leftfold.compared.same && leftfold.turned.size > 0")
    text = page.locator("#panel").text_content()
    assert "figures" in text and "generation tokens" in text
    page.keyboard.press("x")
    at(page, 60)


def test_an_event_left_out_and_one_put_in_are_marked_hypothetical(page: Any, server: Server) -> None:
    first = server.api.entries[0].world.tape.between(1, 20)
    seq = next(seq for seq, event in first if getattr(event, "rid", "") == "r0")
    page.evaluate(f"leftfold.go({seq})")
    at(page, seq)
    page.keyboard.press("5")
    page.locator("#skip").click()
    until(page, "leftfold.world > 0 && leftfold.differences?.count > 0")
    page.locator("#hypothetical").wait_for(state="visible")
    assert "served otherwise" in page.locator("#panel").text_content()
    page.locator("text=back to what was recorded").click()
    until(page, "leftfold.world === 0")
    page.locator("#hypothetical").wait_for(state="hidden")  # drawn after the answer is in
    page.evaluate("leftfold.go(100)")
    at(page, 100)
    page.select_option("#insert-type", "admit")
    page.fill("input[name=rid]", "<i>new</i>")
    page.fill("input[name=prompt_tokens]", "12")
    page.locator("#insert").click()
    until(page, "leftfold.world > 0 && leftfold.differences?.rows.some((row) => row.rid === '<i>new</i>')")
    assert page.locator("#panel i").count() == 0


def test_the_shortcuts_are_listed(page: Any) -> None:
    page.keyboard.press("?")
    assert page.locator("dialog#keys").is_visible() and page.locator("#keys kbd").count() >= 15
    page.keyboard.press("Escape")
    assert not page.locator("dialog#keys").is_visible()
