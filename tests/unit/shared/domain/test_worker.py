"""A worker's states and the arithmetic of losing it."""

import pytest

from shared.domain.ids import Incarnation, WorkerId
from shared.domain.request import Role
from shared.domain.worker import (
    CONTINUED_TOKENS,
    LossLimits,
    WorkerChange,
    WorkerFacts,
    WorkerRef,
    WorkerSigns,
    WorkerState,
    advance_worker,
    lost_reason,
    num_tokens_at_start,
)

LIMITS = LossLimits(silence_s=5.0, step_stall_s=10.0)


def facts(**changed: object) -> WorkerFacts:
    """A sound decode worker, but for what is changed."""
    sound: dict[str, object] = {
        "role": Role.DECODE,
        "ref": WorkerRef(WorkerId("d"), Incarnation(1)),
        "address": "a:1",
        "admin_url": "",
        "pid": 1,
        "layout": b"l",
        "block_size": 16,
        "num_blocks": 4,
        "max_sequences": 2,
        "token_budget": 0,
    }
    return WorkerFacts(**{**sound, **changed})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "changed",
    [
        {"role": Role.GATEWAY},
        {"ref": WorkerRef(WorkerId(""), Incarnation(1))},
        {"num_blocks": 0},
        {"block_size": 0},
        {"role": Role.PREFILL, "token_budget": 0},
    ],
)
def test_a_hello_that_cannot_be_is_refused(changed: dict[str, object]) -> None:
    """A worker is valid by construction."""
    with pytest.raises(ValueError, match="worker"):
        facts(**changed)


def test_tokens_are_rounded_up_to_blocks() -> None:
    """One token more than a block needs another."""
    assert [1, 1, 2] == [facts().num_blocks_for(tokens) for tokens in (1, 16, 17)]


@pytest.mark.parametrize(
    ("signs", "reason"),
    [
        (WorkerSigns(heard_at=95.1), None),
        (WorkerSigns(heard_at=95.0), "no heartbeat"),
        (WorkerSigns(heard_at=100.0, session_broken_at=95.0), "session broken"),
        (WorkerSigns(heard_at=100.0, session_broken_at=96.0), None),
        (WorkerSigns(heard_at=99.0, last_step_age_s=9.0, is_busy=True), "engine step stalled"),
        (WorkerSigns(heard_at=99.0, last_step_age_s=9.0, is_busy=False), None),
        (WorkerSigns(heard_at=99.0, last_step_age_s=8.9, is_busy=True), None),
    ],
)
def test_a_worker_is_lost_by_silence_or_a_stalled_step(signs: WorkerSigns, reason: str | None) -> None:
    """At exactly the limit, not before."""
    assert reason == lost_reason(signs, 100.0, LIMITS)


def test_only_a_hello_brings_a_lost_worker_back() -> None:
    """And a change that means nothing in a state leaves it as it is."""
    for change in WorkerChange:
        after = WorkerState.STARTING if change is WorkerChange.SAID_HELLO else WorkerState.LOST
        assert after is advance_worker(WorkerState.LOST, change)
    assert WorkerState.READY is advance_worker(WorkerState.STARTING, WorkerChange.SETTLED)
    assert WorkerState.READY is advance_worker(WorkerState.READY, WorkerChange.LEFT)
    assert WorkerState.STOPPED is advance_worker(WorkerState.DRAINING, WorkerChange.LEFT)


@pytest.mark.parametrize(("tokens", "longest", "blocks"), [(1, 100, 2), (16, 100, 2), (17, 100, 3), (16, 16, 1)])
def test_a_sequence_begins_with_a_block_to_go_on_into(tokens: int, longest: int, blocks: int) -> None:
    """Where its longest answer can reach one."""
    assert blocks == facts().num_blocks_at_start(tokens, longest)


@pytest.mark.parametrize(("delivered", "tokens"), [(0, 20), (1, 21 + CONTINUED_TOKENS), (9, 29 + CONTINUED_TOKENS)])
def test_a_continued_sequence_begins_with_room_for_its_next_tokens(delivered: int, tokens: int) -> None:
    """So that a replay is not for nothing."""
    assert tokens == num_tokens_at_start(20, delivered)
