"""Every kind that can be counted is one that a test drives."""

import re
from pathlib import Path

import pytest

from shared.domain.refusals import RefusedKind

TESTS = Path(__file__).resolve().parents[3]
SCENARIOS = TESTS / "scenario" / "scheduler"


def named_in_tests() -> set[str]:
    """Kinds that a contract or unit test names, or that a transcript of the scheduler's core counts."""
    names: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        if path != Path(__file__):
            names |= set(re.findall(r"\bRefusedKind\.([A-Z_]+)", path.read_text()))
    for path in SCENARIOS.glob("*.txt"):
        names |= {name.upper() for name in re.findall(r"^count (\w+)$", path.read_text(), re.MULTILINE)}
    return names


@pytest.mark.parametrize("kind", RefusedKind)
def test_it_is_driven_by_a_test(kind: RefusedKind) -> None:
    """What nobody asserts may be counted wrongly, or never."""
    assert kind.name in named_in_tests()
