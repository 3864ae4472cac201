"""What happens in one run under fault, and when: a pure function of the seed, so that a run that failed can be asked for again.

Times are seconds from the begin of the run. Nothing here knows a process.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from tests.support.script import Piece, Script

SETTLE_S = 6.0  # no fault begins in the last seconds: what they leave behind is looked at while requests still come
FIRST_FAULT_S = 3.0
FAULT_PAUSE_S = (0.5, 4.5)  # from one to the next: some meet, some leave time to recover
REQUESTS_PER_S = 2.5
# So many long answers at once, now and then: together they need more blocks than the workers have.
CROWD = 14
CROWD_EVERY_S = 25.0
CROWD_REPEAT = 50
# One character over two or three tokens, of each length that UTF-8 has: a lost or doubled token breaks it.
SPLIT_CHARACTERS: tuple[tuple[bytes, ...], ...] = (
    (b"\xc3", b"\xa9"),
    (b"\xe4\xba", b"\xac"),
    (b"\xf0\x9f", b"\x99", b"\x82"),
)
# What many prompts begin with: their blocks are shared and cached.
OPENINGS = ("It was a dark and stormy night; " * 4, "Call me what you like, but call me often. " * 3)


class FaultKind(StrEnum):
    """What is done to the system. The value is what a reader of a failed run sees."""

    KILL = "kill"
    FREEZE = "freeze"
    REDIS_KILL = "redis-kill"
    REDIS_FREEZE = "redis-freeze"
    LINK_CUT = "link-cut"
    LINK_SLOW = "link-slow"
    LINK_SILENT = "link-silent"


class Fate(StrEnum):
    """What the client does after a while, if the answer has not ended by then."""

    READ = "read"
    LEAVE = "leave"
    DELETE = "delete"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One fault. `lasts_s` 0 = over at once; `target` names a process of `up`, or is empty for Redis and links."""

    at_s: float
    kind: FaultKind
    target: str = ""
    lasts_s: float = 0.0

    @property
    def ends_s(self) -> float:
        return self.at_s + self.lasts_s

    def __str__(self) -> str:
        lasting = f" for {self.lasts_s:.1f} s" if self.lasts_s else ""
        return f"{self.at_s:7.2f} {self.kind} {self.target}{lasting}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request. `after_s` counts from when it is asked."""

    at_s: float
    number: int
    script: Script
    is_stream: bool
    by_proxy: bool
    """Through the link that is cut and slowed."""
    fate: Fate
    after_s: float = 0.0
    is_resumable: bool = False
    """Read on wherever the connection is cut."""

    def __str__(self) -> str:
        form = "resumable" if self.is_resumable else "stream" if self.is_stream else "whole"
        way = "proxy" if self.by_proxy else "direct"
        end = "" if self.fate is Fate.READ else f", {self.fate} after {self.after_s:.2f} s"
        return (
            f"{self.at_s:7.2f} ask #{self.number} {form} {way}: {self.script.num_prompt_tokens} tokens in, "
            f"{self.script.num_pieces} out, {self.script.step_ms} ms a step{end}"
        )


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
    """The run that belongs to this seed and duration, with two workers a role. Below full load there are no crowds."""
    choose = random.Random(f"{seed}/{duration_s}")  # a text: neighbouring numbers have nothing in common
    questions = _questions(choose, duration_s, load)
    workers = [f"{role}-{number}" for role in ("prefill", "decode") for number in range(2)]
    return Schedule(
        seed=seed,
        duration_s=duration_s,
        transport="shm" if seed % 2 else "grpc",
        questions=tuple(replace(each, number=number) for number, each in enumerate(questions)),
        faults=tuple(_faults(choose, duration_s, workers)),
    )


def _questions(choose: random.Random, duration_s: float, load: float) -> list[Question]:
    found: list[Question] = []
    at_s = 0.0
    while at_s < duration_s:
        fate = choose.choices([Fate.READ, Fate.LEAVE, Fate.DELETE], [8, 2, 1])[0]
        is_stream = choose.random() < 0.8
        found.append(
            Question(
                at_s=at_s,
                number=len(found),
                script=_script(choose, len(found), repeat=choose.choice([1, 2, 5, 10])),
                is_stream=is_stream,
                is_resumable=is_stream and fate is Fate.READ and choose.random() < 0.3,
                by_proxy=choose.random() < 0.4,
                fate=fate,
                # Early ones hit the queue, the placing and the prompt; late ones the answer.
                after_s=0.0 if fate is Fate.READ else choose.choice([0.02, 0.2, 2.0]) * choose.random(),
            )
        )
        # In bursts: a queue, and blocks that run short, come of several at once.
        at_s += 0.0 if choose.random() < 0.4 else choose.expovariate(0.6 * REQUESTS_PER_S * load)
    num_crowds = 0 if load < 1.0 else int((duration_s + CROWD_EVERY_S / 2) / CROWD_EVERY_S)
    for number in range(num_crowds):
        begin_s = CROWD_EVERY_S * number + choose.uniform(2.0, CROWD_EVERY_S / 2)
        found += [_of_a_crowd(choose, begin_s, len(found) + member) for member in range(CROWD)]
    return sorted(found, key=lambda question: question.at_s)


def _of_a_crowd(choose: random.Random, at_s: float, number: int) -> Question:
    return Question(
        at_s=at_s + 0.2 * choose.random(),
        number=number,
        script=_script(choose, number, repeat=CROWD_REPEAT, num_words=30, step_ms=1),
        is_stream=True,
        by_proxy=choose.random() < 0.2,
        fate=Fate.READ,
    )


def _script(
    choose: random.Random, number: int, *, repeat: int, num_words: int | None = None, step_ms: int | None = None
) -> Script:
    """Words that name their request and their place, with characters that come in parts between them."""
    pieces: list[Piece] = [choose.choice(OPENINGS)] if choose.random() < 0.5 else []
    for place in range(num_words or choose.choice([4, 12, 30])):
        pieces.append(f"{number}.{place} ")
        if choose.random() < 0.3:
            pieces.extend(choose.choice(SPLIT_CHARACTERS))
    return Script(
        pieces=pieces,
        repeat=repeat,
        prefill_ms=choose.choice([0, 0, 50, 400]),
        step_ms=step_ms or choose.choice([1, 5, 20]),
    )


def _faults(choose: random.Random, duration_s: float, workers: list[str]) -> list[Fault]:
    found: list[Fault] = []
    at_s = FIRST_FAULT_S + choose.random()
    while at_s < duration_s - SETTLE_S:
        found.append(_fault(choose, at_s, workers))
        at_s += choose.uniform(*FAULT_PAUSE_S)
    return found


def _fault(choose: random.Random, at_s: float, workers: list[str]) -> Fault:
    weights = {
        FaultKind.KILL: 6,
        FaultKind.FREEZE: 5,
        FaultKind.REDIS_KILL: 1,
        FaultKind.REDIS_FREEZE: 2,
        FaultKind.LINK_CUT: 2,
        FaultKind.LINK_SLOW: 2,
        FaultKind.LINK_SILENT: 1,
    }
    kind = choose.choices(list(weights), list(weights.values()))[0]
    target, lasts_s = "", 0.0
    match kind:
        case FaultKind.KILL:
            target = _process(choose, workers)
        case FaultKind.FREEZE:
            target = _process(choose, workers)
            lasts_s = choose.choice(
                [choose.uniform(0.2, 2.0), choose.uniform(6.0, 9.0)]
            )  # not lost, and lost after 5 s
        case FaultKind.REDIS_KILL | FaultKind.REDIS_FREEZE:
            lasts_s = choose.uniform(0.3, 4.0)
        case FaultKind.LINK_CUT | FaultKind.LINK_SLOW | FaultKind.LINK_SILENT:
            lasts_s = choose.uniform(0.2, 3.0)
    return Fault(at_s=at_s, kind=kind, target=target, lasts_s=lasts_s)


def _process(choose: random.Random, workers: list[str]) -> str:
    """One of the workers, or now and then the scheduler, and seldom the gateway: that cuts everyone off."""
    name = choose.choices(["worker", "scheduler-0", "gateway-0"], [10, 3, 1])[0]
    return choose.choice(workers) if name == "worker" else name
