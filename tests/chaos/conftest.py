import pytest

from tests.support.chaos_figures import Figures, table

FIGURES = pytest.StashKey[list[Figures]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make chaos` passes on."""
    parser.addoption("--chaos-minutes", type=float, help="for so long, in runs of at most 4 minutes")
    parser.addoption("--chaos-seed", type=int, help="of the first run; the next has the next")
    parser.addoption(
        "--chaos-model", action="store_true", help="with the default model instead of the scripted answers"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Each run adds to them."""
    config.stash[FIGURES] = []


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> list[Figures]:
    """Of the runs so far that found nothing."""
    return request.config.stash[FIGURES]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table of docs/reliability.md."""
    if runs := config.stash[FIGURES]:
        terminalreporter.section("chaos")
        terminalreporter.write_line(table(runs, num_failed=len(terminalreporter.getreports("failed"))))
