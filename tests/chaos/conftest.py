import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `make chaos` passes on."""
    parser.addoption("--chaos-minutes", type=float, help="for so long, in runs of at most 4 minutes")
    parser.addoption("--chaos-seed", type=int, help="of the first run; the next has the next")
    parser.addoption(
        "--chaos-model", action="store_true", help="with the default model instead of the scripted answers"
    )
