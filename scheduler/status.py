"""The fleet in numbers, for people and for the gateway. Pure; every state is there, zeros included."""

from collections.abc import Mapping
from dataclasses import dataclass

from scheduler.core import SchedulerCore
from shared.domain.request import Role, SequenceState
from shared.domain.worker import WorkerState

BLOCK_STATES: tuple[str, ...] = ("free", "reserved", "active", "cached", "quarantined")  # decisions §0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Counts by state."""

    requests: Mapping[str, int]
    blocks: Mapping[Role, Mapping[str, int]]
    """Summed over the workers that have told them and are not lost."""
    sequences: Mapping[str, int]
    num_unreleased: int
    """(worker, attempt) pairs that still owe a release, requests that this scheduler never knew included."""
    max_request_tokens: int
    """Largest prompt + max_tokens that fits some pool; 0 = no workers."""


def snapshot(core: SchedulerCore) -> Snapshot:
    """As of the last words of every worker."""
    blocks = {role: dict.fromkeys(BLOCK_STATES, 0) for role in (Role.PREFILL, Role.DECODE)}
    sequences = {state.value: 0 for state in SequenceState}
    num_orphans = 0
    for worker in core.fleet:
        if worker.state in (WorkerState.LOST, WorkerState.STOPPED):
            continue
        num_orphans += sum(1 for key in worker.owed if core.ledger.get(key.request_id) is None)
        if worker.capacity is None:
            continue
        for state, count in worker.capacity.blocks.items():
            blocks[worker.facts.role][state] = blocks[worker.facts.role].get(state, 0) + count
        for state, count in worker.capacity.sequences.items():
            sequences[state] = sequences.get(state, 0) + count
    return Snapshot(
        requests={state.value: count for state, count in core.ledger.num_by_state().items()},
        blocks=blocks,
        sequences=sequences,
        num_unreleased=core.ledger.num_unreleased() + num_orphans,
        max_request_tokens=max_request_tokens(core),
    )


def max_request_tokens(core: SchedulerCore) -> int:
    """Of the decode pools that some prefill worker can feed."""
    layouts = {worker.facts.layout for worker in core.fleet.of_role(Role.PREFILL) if worker.is_expected}
    return max(
        (
            worker.facts.num_blocks * worker.facts.block_size
            for worker in core.fleet.of_role(Role.DECODE)
            if worker.is_expected and worker.facts.layout in layouts
        ),
        default=0,
    )
