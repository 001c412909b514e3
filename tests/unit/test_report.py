"""The report: its figures are the log's, and nothing that a log says can be more than text on the page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from leftfold import cli
from leftfold.events import EventLog, ExecutorLost
from leftfold.replay.report import build, render
from leftfold.replay.report.page import shown
from leftfold.replay.report.svg import Curve, distribution, life, over_time, ticks
from leftfold.replay.worlds import World
from tests.logs import CONFIG, Recorder, record
from tests.unit.test_replay_views import simulated

EVIL = '<script>alert(1)</script>"\'><img src=x onerror=alert(2)>\u202e\n'


def test_figures_are_those_of_the_log() -> None:
    report = build(World.read(simulated()), "made")
    found = report.as_dict()
    assert (found["requests"], found["ended"], found["output_tokens"]) == (12, {"length": 12}, 240)
    assert sum(report.series["preemptions"]) == found["preemptions"] > 0
    assert max(report.series["waiting"]) >= 8 and max(report.series["running"]) == 4
    assert all(a + b <= found["num_pages"] for a, b in zip(report.series["held"], report.series["cached"], strict=True))
    width = found["seconds"] / len(report.series["decode"])
    computed = (sum(report.series["decode"]) + sum(report.series["prefill"])) * width
    assert computed >= found["prompt_tokens"] * (1 - found["cache_hit_share"])
    assert len(report.steps) == found["steps"]
    slow = found["slowest"]
    assert [one["e2e_ms"] for one in slow] == sorted((one["e2e_ms"] for one in slow), reverse=True)
    assert any("pages" in text or "slot" in text for one in slow for text in one["because"])
    for one in slow:
        assert sum(end - begin for _, begin, end in one["spans"]) == pytest.approx(one["e2e_ms"])


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def evil_log() -> EventLog:
    log = EventLog.memory()
    made = Recorder(log, CONFIG, model=EVIL)
    made.admit(EVIL, list(range(1, 9)), max_tokens=5)
    made.admit("b", list(range(1, 9)), max_tokens=5)
    made.run()
    return log


def test_whatever_a_log_says_is_text_and_the_page_loads_and_runs_nothing() -> None:
    page = render(build(World.read(evil_log()), EVIL))
    tags = Tags()
    tags.feed(page)
    names = {tag for tag, _ in tags.seen}
    assert not names & {"script", "img", "link", "iframe", "object", "a", "form", "base"}
    assert not [name for _, attributes in tags.seen for name in attributes if name.startswith("on") or name == "style"]
    assert "&lt;script&gt;" in page and "\u202e" not in page
    assert not [name for _, attributes in tags.seen for name in attributes if name in ("href", "src", "xlink:href")]
    [style] = re.findall(r"<style>(.*?)</style>", page, re.S)
    [policy] = [attributes["content"] for tag, attributes in tags.seen if "http-equiv" in attributes]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy is not None and f"'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme: dark" in style


def test_a_log_without_requests_or_answers_has_a_page() -> None:
    log = EventLog.memory()
    assert "no answered request" in render(build(World.read(log), "without a record"))
    Recorder(log)
    assert "no answered request" in render(build(World.read(log), "empty"))
    some = EventLog.memory()
    record(some)
    page = render(build(World.read(some), "some"))
    assert page.count("<article>") == 2 and "preempted" in page


def test_a_request_that_only_a_loss_put_back_is_told_so() -> None:
    log = EventLog.memory()
    made = Recorder(log)
    made.admit("a", [1, 2, 3])
    made.run(2)
    made.take(ExecutorLost, error="gone")
    made.start()
    made.run()
    report = build(World.read(log), "lost")
    [slow] = report.slowest
    assert slow["preempted_ms"] > 0 and slow["preemptions"] == 0
    told = "it had to give its row up and go back in line: the executor was lost"
    assert [told in text for text in slow["because"]] == [False, True] and told in render(report)
    assert "while the executor was absent: from the ExecutorLost at seq 7 to the Started at seq 8" in slow["because"][0]


def test_text_is_shown_without_what_steers_it() -> None:
    assert shown("a\x00b\x1b[31m") == "a␀b␛[31m"
    assert shown("x" * 200, 10) == "x" * 9 + "…"
    assert shown("\ud800\u200f\u2067") == "\ufffd" * 3


@pytest.mark.parametrize("most", [0.0, 0.003, 1, 7, 10, 999, 123456])
def test_ticks_are_few_and_reach_the_top(most: float) -> None:
    found = ticks(most)
    assert 2 <= len(found) <= 8 and found[0] == 0 and found[-1] >= most * 0.99


def test_plots_are_well_formed_and_areas_stack() -> None:
    curves = [Curve("a", "decode", [1, 2, 3]), Curve("b", "free", [3, 2, 1]), Curve("<c>", "waiting", [9, 0, 0], False)]
    drawn = over_time('"n"', [0, 1, 2, 3], curves)
    ElementTree.fromstring(drawn)
    tops = [float(y) for y in re.findall(r",([\d.]+)", re.findall(r'points="([^"]*)"', drawn)[1])]
    assert tops[0] == tops[2] == tops[4], "the sum is 4 everywhere"
    for values in ([], [0.0], [5.0], [1, 2, 3], [0.001, 5000.0]):
        bars = ElementTree.fromstring(distribution("d", values, "decode"))
        drawn_bars = [one for one in bars.iter("rect") if "bar" in one.get("class", "")]
        assert sum(float(one.get("height", "0")) > 0 for one in drawn_bars) == min(len(set(values)), 40)
    ElementTree.fromstring(life([("decode", 0.0, 1.0)], 2.0))


def test_the_command_writes_the_page_and_says_what_is_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with EventLog.open(tmp_path / "log") as log:
        record(log)
    out = tmp_path / "report.html"
    assert cli.main(["replay", "report", str(tmp_path / "log"), "-o", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["out"] == str(out) and found["requests"] == 4 and found["ttft_ms"]["p50"] > 0
    assert out.read_text().startswith("<!doctype html>")
    assert cli.main(["replay", "report", str(tmp_path / "log"), "-o", str(tmp_path / "no" / "where.html")]) == 2
    assert cli.main(["replay", "report", str(tmp_path / "nothing"), "-o", str(out)]) == 2
