"""The fleet in numbers."""

from scheduler.core import CoreLimits, SchedulerCore
from scheduler.messages import HeartbeatTold, InventoryTold, SessionId, SessionOpened
from scheduler.status import max_request_tokens, snapshot
from shared.domain.ids import Epoch, Incarnation, WorkerId
from shared.domain.request import Role
from shared.domain.worker import Capacity, LossLimits, WorkerFacts, WorkerRef


def core_with(*workers: tuple[Role, int, bytes]) -> SchedulerCore:
    """Workers of so many blocks and a layout, ready, with all but one block free."""
    limits = CoreLimits(max_queued_requests=1, max_queued_prompt_tokens=1, loss=LossLimits(), gateway_grace_s=5.0)
    core = SchedulerCore(limits, Epoch(1))
    for number, (role, blocks, layout) in enumerate(workers):
        facts = WorkerFacts(
            role=role,
            ref=WorkerRef(WorkerId(f"w{number}"), Incarnation(1)),
            address="a",
            admin_url="",
            pid=1,
            layout=layout,
            block_size=16,
            num_blocks=blocks,
            max_sequences=1,
            token_budget=1,
        )
        session = SessionId(number)
        told = Capacity(blocks={"free": blocks - 1, "active": 1}, sequences={"running": 1})
        core.step(SessionOpened(session=session, facts=facts, epoch_seen=Epoch(0)), 0.0)
        core.step(InventoryTold(session=session, entries=()), 0.0)
        core.step(HeartbeatTold(session=session, capacity=told), 0.0)
    return core


def test_blocks_and_sequences_are_summed_by_role() -> None:
    """With every state, zeros included."""
    seen = snapshot(core_with((Role.PREFILL, 4, b"l"), (Role.DECODE, 8, b"l"), (Role.DECODE, 6, b"l")))

    assert {"free": 12, "reserved": 0, "active": 2, "cached": 0, "quarantined": 0} == seen.blocks[Role.DECODE]
    assert {"waiting_kv": 0, "running": 3, "parked": 0, "preempted": 0, "done": 0} == seen.sequences


def test_the_largest_request_fits_a_pool_that_someone_can_feed() -> None:
    """A decode worker of another layout than every prefill worker is of no use."""
    assert 128 == max_request_tokens(
        core_with((Role.PREFILL, 4, b"l"), (Role.DECODE, 8, b"l"), (Role.DECODE, 99, b"x"))
    )
    assert 0 == max_request_tokens(core_with((Role.DECODE, 8, b"l")))
