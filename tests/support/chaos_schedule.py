"""What happens in one run under fault, and when: a pure function of the seed, so that a run that failed can be asked for again.

Times are seconds from the begin of the run. Nothing here knows a process.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from tests.support import chaos_load
from tests.support.chaos_load import Question

SETTLE_S = 6.0  # no fault begins in the last seconds: what they leave behind is looked at while requests still come
FIRST_FAULT_S = 3.0
FAULT_PAUSE_S = (0.5, 4.5)  # from one to the next: some meet, some leave time to recover
NUM_GATEWAYS = 2
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
GATEWAYS = ("gateway-0", "gateway-1")
ACTIVE_SCHEDULER = "scheduler"
"""Whichever is the active one by then; the other one stands by."""
SCHEDULERS = (ACTIVE_SCHEDULER, "scheduler-0", "scheduler-1")
BEHIND_A_PROXY = ("prefill-1", "decode-1")
"""Workers whose link to the scheduler is ours."""


class FaultKind(StrEnum):
    """What is done to the system. The value is what a reader of a failed run sees."""

    KILL = "kill"
    FREEZE = "freeze"
    TERMINATE = "terminate"
    """SIGTERM: it drains, and is started again."""
    REDIS_KILL = "redis-kill"
    REDIS_FREEZE = "redis-freeze"
    LINK_CUT = "link-cut"
    """The links of clients to one gateway."""
    LINK_SLOW = "link-slow"
    LINK_SILENT = "link-silent"
    REDIS_LINK_CUT = "redis-link-cut"
    """One process and Redis."""
    REDIS_LINK_SLOW = "redis-link-slow"
    SCHEDULER_LINK_CUT = "scheduler-link-cut"
    """One worker and the scheduler."""
    SCHEDULER_LINK_SILENT = "scheduler-link-silent"
    REDIS_LATE = "redis-late"
    """Seen, not done: it answered late, whatever the reason."""
    STARVED = "starved"
    """Seen, not done: the run's own process stood still, so that others may have, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `lasts_s` 0 = over at once; `target` names a process, or is empty for Redis itself."""

    at_s: float
    kind: FaultKind
    target: str = ""
    lasts_s: float = 0.0
    delay_s: float = 0.0
    """Of each reply on a slow link."""

    @property
    def ends_s(self) -> float:
        return self.at_s + self.lasts_s

    def __str__(self) -> str:
        lasting = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        delay = f" by {self.delay_s:.1f} s" if self.delay_s else ""
        return f"{self.at_s:7.2f} {self.kind} {self.target}".rstrip() + delay + lasting


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One run."""

    seed: int
    duration_s: float
    transport: str
    questions: tuple[Question, ...]
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        """Every event, a line each, by time."""
        events: Sequence[Question | Fault] = sorted([*self.questions, *self.faults], key=lambda event: event.at_s)
        head = f"seed {self.seed}, {self.duration_s:.0f} s, KV by {self.transport}"
        return "\n".join([head, *map(str, events)])


def plan(seed: int, duration_s: float, *, load: float = 1.0) -> Schedule:
    """The run that belongs to this seed and duration. Below full load there are no crowds."""
    choose = random.Random(f"{seed}/{duration_s}")  # a text: neighbouring numbers have nothing in common
    questions = chaos_load.questions(choose, duration_s, load, num_gateways=NUM_GATEWAYS)
    return Schedule(
        seed=seed,
        duration_s=duration_s,
        transport="shm" if seed % 2 else "grpc",
        questions=tuple(replace(each, number=number) for number, each in enumerate(questions)),
        faults=tuple(_faults(choose, duration_s)),
    )


def _faults(choose: random.Random, duration_s: float) -> list[Fault]:
    found: list[Fault] = []
    at_s = FIRST_FAULT_S + choose.random()
    while at_s < duration_s - SETTLE_S:
        found.append(_fault(choose, at_s))
        at_s += choose.uniform(*FAULT_PAUSE_S)
    return found


SEEN = frozenset({FaultKind.REDIS_LATE, FaultKind.STARVED})
_WEIGHTS = {
    FaultKind.KILL: 7,
    FaultKind.FREEZE: 5,
    FaultKind.TERMINATE: 4,
    FaultKind.REDIS_KILL: 1,
    FaultKind.REDIS_FREEZE: 1,
    FaultKind.LINK_CUT: 3,
    FaultKind.LINK_SLOW: 1,
    FaultKind.LINK_SILENT: 1,
    FaultKind.REDIS_LINK_CUT: 1,
    FaultKind.REDIS_LINK_SLOW: 1,
    FaultKind.SCHEDULER_LINK_CUT: 1,
    FaultKind.SCHEDULER_LINK_SILENT: 1,
}


def _fault(choose: random.Random, at_s: float) -> Fault:
    kind = choose.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
    target, lasts_s, delay_s = "", 0.0, 0.0
    match kind:
        case FaultKind.KILL | FaultKind.TERMINATE:
            target = _process(choose)
        case FaultKind.FREEZE:
            target, lasts_s = _process(choose), _short_or_long(choose)
        case FaultKind.REDIS_KILL | FaultKind.REDIS_FREEZE:
            lasts_s = choose.uniform(0.3, 4.0)
        case FaultKind.LINK_CUT | FaultKind.LINK_SLOW | FaultKind.LINK_SILENT:
            target, lasts_s = choose.choice(GATEWAYS), choose.uniform(0.2, 3.0)
            delay_s = 0.1 if kind is FaultKind.LINK_SLOW else 0.0
        case FaultKind.REDIS_LINK_CUT:
            target, lasts_s = choose.choice([*GATEWAYS, ACTIVE_SCHEDULER]), _short_or_long(choose)
        case FaultKind.REDIS_LINK_SLOW:
            target, lasts_s = choose.choice([*GATEWAYS, ACTIVE_SCHEDULER]), choose.uniform(1.0, 6.0)
            delay_s = choose.choice([0.2, 0.8])  # services wait 0.5 s: late, and too late
        case FaultKind.SCHEDULER_LINK_CUT | FaultKind.SCHEDULER_LINK_SILENT:
            target, lasts_s = choose.choice(BEHIND_A_PROXY), _short_or_long(choose)
        case FaultKind.REDIS_LATE | FaultKind.STARVED:
            raise ValueError("nobody does that")
    return Fault(at_s=at_s, kind=kind, target=target, lasts_s=lasts_s, delay_s=delay_s)


def _short_or_long(choose: random.Random) -> float:
    """Not lost, and lost: leases last 3 s, workers are given up after 5 s, gateways after 9 s."""
    return choose.choice([choose.uniform(0.2, 2.0), choose.uniform(6.0, 10.0)])


def _process(choose: random.Random) -> str:
    """A worker, or now and then a scheduler or a gateway: the latter cuts its clients off."""
    role = choose.choices([WORKERS, SCHEDULERS, GATEWAYS], [10, 4, 2])[0]
    return choose.choices(role, [3, 1, 1] if role is SCHEDULERS else None)[0]
