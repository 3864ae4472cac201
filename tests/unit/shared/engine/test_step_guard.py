"""Tests of `shared.engine.step_guard`."""

import pytest

from shared.engine.executor import SequenceFault
from shared.engine.step_guard import MAX_BROKEN_STEPS_IN_A_ROW, StepGuard


def _broken() -> list[int]:
    raise ZeroDivisionError("prompt text must not get out")


def test_results_pass_through() -> None:
    """A good step is none of the guard's business."""
    assert [1, 2] == StepGuard().run(lambda: [1, 2], 2)


def test_a_broken_step_fails_each_member() -> None:
    """One fault a member, without what the exception said."""
    faults = StepGuard().run(_broken, 2)

    assert ["INTERNAL: internal error"] * 2 == [str(fault) for fault in faults]
    assert all(isinstance(fault, SequenceFault) for fault in faults)


def test_too_many_in_a_row_raise() -> None:
    """The executor counts as broken, and the exception goes on."""
    guard = StepGuard()
    for _ in range(MAX_BROKEN_STEPS_IN_A_ROW - 1):
        guard.run(_broken, 1)

    with pytest.raises(ZeroDivisionError):
        guard.run(_broken, 1)


def test_a_good_step_between_starts_the_count_again() -> None:
    """Steps that break now and then cost their members only."""
    guard = StepGuard()
    for _ in range(3 * MAX_BROKEN_STEPS_IN_A_ROW):
        guard.run(_broken, 1)
        assert [5] == guard.run(lambda: [5], 1)


def test_a_step_must_answer_for_every_member() -> None:
    """Results of another number would go to the wrong sequences."""
    with pytest.raises(RuntimeError, match="2 sequences gave 1"):
        StepGuard().run(lambda: [1], 2)
