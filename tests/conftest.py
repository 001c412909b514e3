"""Settings for all tests: property tests do not depend on the machine's speed; how long to fuzz, from which seed."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import pytest
from hypothesis import settings

ASKED = os.environ.get("LEFTFOLD_COMPILED")
os.environ["LEFTFOLD_COMPILED"] = ASKED or "off"  # tests plant faults, and look where machine code shows nothing

from leftfold.compiled import in_use  # noqa: E402
from leftfold.fsm import POLICIES  # noqa: E402

assert ASKED != "on" or in_use(), "LEFTFOLD_COMPILED is on, and there is no machine code: run `leftfold compile`"
if ASKED is None:
    del os.environ["LEFTFOLD_COMPILED"]  # servers that tests start run as they do anywhere else

settings.register_profile("leftfold", deadline=None, print_blob=True)
settings.load_profile("leftfold")

FUZZ_SECONDS = 90.0


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("leftfold")
    group.addoption("--fuzz-seconds", type=float, default=float(os.environ.get("LEFTFOLD_FUZZ_SECONDS", FUZZ_SECONDS)),
                    help="how long to fuzz, all profiles together (default: LEFTFOLD_FUZZ_SECONDS, or 90)")  # fmt: skip
    group.addoption("--fuzz-seed", type=int, default=None, help="what the fuzzing begins with (default: drawn anew)")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--fuzz-seed") is None:
        config.option.fuzz_seed = secrets.randbits(32)


def pytest_report_header(config: pytest.Config) -> str:
    return f"fuzz: --fuzz-seed {config.option.fuzz_seed} --fuzz-seconds {config.option.fuzz_seconds:g}"


@pytest.fixture
def fuzz_seed(request: pytest.FixtureRequest) -> int:
    """The seed of this session, which its header shows."""
    return int(request.config.option.fuzz_seed)


@pytest.fixture
def fuzz_seconds(request: pytest.FixtureRequest) -> float:
    """Seconds for all fuzzing of this session."""
    return float(request.config.option.fuzz_seconds)


@pytest.fixture(autouse=True)
def _policies_as_before() -> Iterator[None]:
    """What a test makes known is not known to the next one."""
    before = POLICIES.copy()
    yield
    POLICIES.clear()
    POLICIES.update(before)
