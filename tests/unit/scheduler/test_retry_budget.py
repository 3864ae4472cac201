"""Retries as a share of what was admitted lately, and a few more."""

from scheduler.retry_budget import RetryBudget


def budget_with(num_admitted: int, at: float = 0.0) -> RetryBudget:
    """A fifth of the requests of a minute and three more."""
    budget = RetryBudget(share=0.2, floor=3, window_s=60.0)
    for _ in range(num_admitted):
        budget.admitted(at)
    return budget


def taken_until_empty(budget: RetryBudget, now: float) -> int:
    """How many there are."""
    taken = 0
    while budget.has_room(now):
        budget.take(now)
        taken += 1
    return taken


def test_a_share_and_a_floor() -> None:
    """An idle system has its few; each five requests give one more."""
    assert [3, 3, 4, 13] == [taken_until_empty(budget_with(num), 1.0) for num in (0, 4, 5, 50)]


def test_what_is_taken_comes_back_after_the_window() -> None:
    """And what was admitted counts no longer than that."""
    budget = budget_with(50)
    assert 13 == taken_until_empty(budget, 1.0)
    assert not budget.has_room(59.9)
    assert 3 == taken_until_empty(budget, 62.0)


def test_asking_takes_nothing() -> None:
    """Only a retry does."""
    budget = RetryBudget(share=0.0, floor=1, window_s=60.0)
    assert [True, True] == [budget.has_room(0.0), budget.has_room(0.0)]
    budget.take(0.0)
    assert not budget.has_room(0.0)
