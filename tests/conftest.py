"""Shows the end of a system's log beside a test that failed with it."""

from collections.abc import Generator
from typing import Any

import pytest

from tests.support.cluster import Cluster


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
