"""Which ends a fault may bring upon a request: one table. What is not in it is a bug."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tests.support.chaos_client import End, Seen
from tests.support.chaos_load import STALL_TIMEOUT_S, Question
from tests.support.chaos_schedule import Fault, FaultKind

CONNECTION_CUT = "(cut)"
"""Stands for a code where a connection ended without a word."""

# A worker or scheduler that was killed is away for: `up`'s longest pause before a restart (10 s), its start, and for
# the scheduler 6 s until the old lease is surely over; all of it on a busy machine.
RETURNS_WITHIN_S = 25.0
LOST_AFTER_S = 12.0  # a silent worker is lost after 5 s, what it was sent is given up within 10 s
SLACK_S = 1.0  # between our clock's "now" and the moment at which a signal has worked


class Need(StrEnum):
    """How much must have happened."""

    ONE = "one fault"
    TWO = "two faults"
    ROLE = "a fault at each worker of a role"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """`target` is the beginning of a process's name, empty for Redis itself. `aftermath_s` counts from a fault's end."""

    kinds: frozenset[FaultKind]
    target: str
    code: str
    aftermath_s: float
    need: Need = Need.ONE
    only_before_head: bool = False
    """Where the client had its 200 already, nothing of this kind may happen any more."""
    only_by_proxy: bool = False
    """Of those who are asked through that link."""
    only_resumable: bool = False
    only_resumed: bool = False


_REDIS = frozenset({FaultKind.REDIS_KILL, FaultKind.REDIS_FREEZE, FaultKind.REDIS_LATE})
_REDIS_LINK = frozenset({FaultKind.REDIS_LINK_CUT, FaultKind.REDIS_LINK_SLOW})
_KILL = frozenset({FaultKind.KILL})
_STILL = frozenset({FaultKind.FREEZE, FaultKind.STARVED})
_STOPPED = _KILL | _STILL
_ENDED = frozenset({FaultKind.KILL, FaultKind.TERMINATE})
_SILENT = _STOPPED | {FaultKind.SCHEDULER_LINK_CUT, FaultKind.SCHEDULER_LINK_SILENT}
"""What makes a worker a lost one."""
_AWAY = _SILENT | {FaultKind.TERMINATE}
_REPLACED = _STOPPED | _REDIS_LINK | {FaultKind.TERMINATE}
"""What gives the lease to another scheduler."""
_WORKER_ROLES = ("prefill", "decode")

TABLE: tuple[Row, ...] = (
    # Nobody tries a third worker with what may have killed two.
    *(
        Row(kinds=_SILENT, target=role, code="request_poisoned", aftermath_s=LOST_AFTER_S, need=Need.TWO)
        for role in _WORKER_ROLES
    ),
    # No worker of a role is there: new requests are refused, waiting ones after 30 s.
    *(
        Row(kinds=_AWAY, target=role, code=code, aftermath_s=after_s, need=Need.ROLE)
        for role in _WORKER_ROLES
        for code, after_s in (("no_capacity", RETURNS_WITHIN_S), ("worker_lost", RETURNS_WITHIN_S + 30.0))
    ),
    # Running ones are adopted, if only a scheduler comes within 30 s: `up` takes longer with one that dies twice.
    Row(kinds=_REPLACED, target="scheduler", code="no_capacity", aftermath_s=2 * RETURNS_WITHIN_S, need=Need.TWO),
    # A gateway holds new requests for 10 s.
    *(
        Row(kinds=_REPLACED, target="scheduler", code=code, aftermath_s=RETURNS_WITHIN_S, only_before_head=True)
        for code in ("no_capacity", "state_unavailable")
    ),
    # And says what the last one it met said, when no other comes in that time.
    Row(
        kinds=frozenset({FaultKind.TERMINATE}),
        target="scheduler",
        code="draining",
        aftermath_s=RETURNS_WITHIN_S,
        only_before_head=True,
    ),
    Row(kinds=_REDIS, target="", code="state_unavailable", aftermath_s=6.0, only_before_head=True),
    # The log of a resumable answer was in a Redis that came back empty, and its gateway, which would have written it
    # again, has lost it, too.
    *(
        Row(
            kinds=frozenset({FaultKind.REDIS_KILL}),
            target="",
            code=code,
            aftermath_s=RETURNS_WITHIN_S,
            only_resumable=True,
        )
        for code in ("request_not_found", "not_found")
    ),
    # Another gateway took over a log that its own could not write: what had been acknowledged meanwhile is gone.
    *(
        Row(kinds=kinds, target=target, code="internal_error", aftermath_s=6.0, only_resumed=True)
        for kinds, target in ((_REDIS, ""), (_REDIS_LINK, "gateway"))
    ),
    # Its own gateway is cut off from Redis since before it was asked: no other one can know it.
    *(
        Row(kinds=_REDIS_LINK, target="gateway", code=code, aftermath_s=6.0, only_resumable=True)
        for code in ("request_not_found", "not_found")
    ),
    # A gateway that is silent for 4 s and its grace of 5 s is lost to the scheduler.
    Row(kinds=_STILL, target="gateway", code="cancelled", aftermath_s=LOST_AFTER_S),
    # One that is cut off from Redis cannot learn who took a dead scheduler's place; that one waits for it no longer.
    Row(kinds=_REDIS_LINK, target="gateway", code="cancelled", aftermath_s=LOST_AFTER_S),
    # One that is being stopped takes nothing new, and cuts off what is left of plain answers at its drain's end.
    Row(kinds=frozenset({FaultKind.TERMINATE}), target="gateway", code="draining", aftermath_s=SLACK_S),
    # It is gone, or not there again yet.
    Row(kinds=_ENDED, target="gateway", code=CONNECTION_CUT, aftermath_s=RETURNS_WITHIN_S),
    Row(
        kinds=frozenset({FaultKind.LINK_CUT}),
        target="gateway",
        code=CONNECTION_CUT,
        aftermath_s=SLACK_S,
        only_by_proxy=True,
    ),
)


def is_explained(seen: Seen, question: Question, faults: Iterable[Fault]) -> bool:
    """Whether an end that is neither an answer nor the client's own doing follows from the faults, or from its plan."""
    faults = list(faults)
    match seen.code:
        case "cancelled" if seen.is_deleted:
            return True
        case "timeout":
            return question.timeout_s is not None and seen.ended_s - seen.asked_s >= question.timeout_s - SLACK_S / 10
        case "slow_client":
            # The reader stands still with the machine, too; what is in its buffers it takes in pieces.
            still_s = sum(fault.lasts_s for fault in _during(seen, faults) if fault.kind is FaultKind.STARVED)
            return seen.paused_s + still_s >= STALL_TIMEOUT_S - SLACK_S
        case _:
            pass
    code = CONNECTION_CUT if seen.end is End.CUT else seen.code
    own_gateway = f"gateway-{seen.gateway}"
    known = [
        fault
        for fault in faults
        # A plain answer has one gateway, a resumable one meets all.
        if question.is_resumable or not fault.target.startswith("gateway") or fault.target == own_gateway
    ]
    return any(
        _holds(row, seen, known)
        for row in TABLE
        if row.code == code
        and not (row.only_before_head and seen.has_begun)
        and not (row.only_by_proxy and not question.by_proxy)
        and not (row.only_resumable and not question.is_resumable)
        and not (row.only_resumed and not seen.num_resumed)
    )


def may_lack_its_line(seen: Seen, faults: Iterable[Fault]) -> bool:
    """A gateway writes the line of a request behind its outcome, and may be gone before that."""
    return any(
        fault.kind in _ENDED
        and fault.target.startswith("gateway")
        and seen.asked_s <= fault.ends_s
        and fault.at_s <= seen.ended_s + RETURNS_WITHIN_S
        for fault in faults
    )


def may_be_unknown(seen: Seen, faults: Iterable[Fault]) -> bool:
    """A DELETE by the client's own id finds nothing where the scheduler that knew how it ended is no more."""
    return any(
        (fault.kind in _REPLACED and fault.target.startswith("scheduler")) or fault.kind in _REDIS
        for fault in faults
        if fault.at_s <= seen.ended_s + SLACK_S
    )


def may_end_twice(seen: Seen, faults: Iterable[Fault]) -> bool:
    """An outcome that Redis did not take is in the scheduler's memory alone: if that dies, too, the next one does not know it.

    The client has had its answer by then. It is told first: who dies in that moment has not written it either.
    """
    near = [
        fault
        for fault in faults
        if seen.asked_s <= fault.ends_s + SLACK_S and fault.at_s <= seen.ended_s + LOST_AFTER_S
    ]
    schedulers = [fault for fault in near if fault.target.startswith("scheduler")]
    is_unwritten = any(fault.kind in _REDIS | _REDIS_LINK for fault in near)
    is_in_between = any(fault.kind in _KILL and abs(fault.at_s - seen.ended_s) <= SLACK_S for fault in schedulers)
    return bool(schedulers) and (is_unwritten or is_in_between)


def _during(seen: Seen, faults: Iterable[Fault]) -> list[Fault]:
    return [fault for fault in faults if fault.at_s <= seen.ended_s and seen.asked_s <= fault.ends_s]


def _holds(row: Row, seen: Seen, faults: list[Fault]) -> bool:
    about = [
        fault
        for fault in faults
        if fault.kind in row.kinds
        and fault.target.startswith(row.target)
        and bool(fault.target) == bool(row.target)
        and fault.at_s - SLACK_S <= seen.ended_s
        and seen.asked_s <= fault.ends_s + row.aftermath_s
    ]
    match row.need:
        case Need.ONE:
            return len(about) >= 1
        case Need.TWO:
            return len(about) >= 2
        case Need.ROLE:
            return {f"{row.target}-0", f"{row.target}-1"} <= {fault.target for fault in about}
