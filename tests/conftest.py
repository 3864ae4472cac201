"""For all tests: logging as it was before, and the end of a system's log beside a test that failed with it."""

import gc
import logging
from collections.abc import Generator
from typing import Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests.support.cluster import Cluster

# The same examples each time, so that a change is judged by what it changed, and no clock: a loaded machine is no failure.
# `pytest --hypothesis-profile search tests/property` looks for new ones.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", settings.get_profile("search"), derandomize=True)
settings.load_profile("gate")


def pytest_collection_finish() -> None:
    """What the tests have imported is there to stay: no collection looks at it again, which took a third of a second each."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds the log of each cluster that the test used."""
    report = yield
    if report.failed:
        funcargs: dict[str, Any] = getattr(item, "funcargs", {})
        for name, value in funcargs.items():
            if isinstance(value, Cluster):
                report.sections.append((f"log of {name} ({value.log_path})", value.log_tail()))
    return report


@pytest.fixture(autouse=True)
def restored_logging() -> Generator[None]:
    """Logging is process-wide: what a test sets up must not write to that test's closed streams in the next."""
    root = logging.getLogger()
    before = (root.handlers, root.level)
    yield
    root.handlers, root.level = before
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
