"""What workers and gateways have observed of each request, from their logs, against the one table of transitions.

No observer sees everything. So the table is walked as an automaton: an observed event must be possible in some state
that the request can have by then, where what nobody outside the scheduler sees (a placement, a cancel, a deadline, a
lost worker, an abort) may have happened at any moment before.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from shared.domain import lifecycle_events as events
from shared.domain.errors import ErrorCode
from shared.domain.lifecycle import IGNORED, TABLE
from shared.domain.request import TERMINAL_STATES, RequestState

REPORTS: Mapping[str, type[events.Event]] = {
    "reserved": events.Reserved,
    "reserve_refused": events.ReserveRefused,
    "prefill_done": events.PrefillDone,
    "kv_committed": events.KvCommitted,
    "sequence_done": events.SequenceDone,
    "attempt_failed": events.AttemptFailed,
    "preempted": events.Preempted,
}
"""Worker events of one attempt. `released` belongs to no state: it is possible in all."""
BEHIND_A_RESERVATION = frozenset({"prefill_done", "kv_committed", "sequence_done", "preempted"})
"""Of states that only Reserved leads to."""
SEEN_BY_NOBODY: tuple[type[events.Event], ...] = (
    events.PlacementChosen,
    events.PlacementWritten,
    events.Delivered,
    events.AnswerComplete,
    events.CancelRequested,
    events.DeadlinePassed,
    events.CapacityLost,
    events.Released,
    events.WorkerLost,
    events.WorkerGone,
    events.AttemptFailed,  # a lost session is the scheduler's word for it
)
TOLD_STATES: Mapping[str, frozenset[RequestState]] = {
    "Queued": frozenset({RequestState.QUEUED, RequestState.PLACING}),
    "Requeued": frozenset({RequestState.QUEUED}),
    "Placed": frozenset({RequestState.PREFILLING, RequestState.TRANSFERRING, RequestState.DECODING}),
}
"""What the scheduler's words to a gateway say of the request's state; an Outcome names its own."""


UNHELD_STATES = frozenset({RequestState.QUEUED, RequestState.PLACING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """One line of a log that says something of a request."""

    at: str
    by: str
    what: str
    attempt: int
    state: str | None = None

    def __str__(self) -> str:
        return f"{self.at} {self.by} {self.what} {self.attempt or ''}{self.state or ''}"


def log_lines(folder: Path) -> list[dict[str, Any]]:
    """Every JSON line of every process, by time. A torn line (its writer was killed in it) is left out."""
    found: list[dict[str, Any]] = []
    for path in sorted([*folder.glob("*.log"), *folder.glob("*.log.1")]):
        for line in path.read_text(errors="replace").splitlines():
            try:
                said = json.loads(line)
            except ValueError:
                continue
            if isinstance(said, dict) and "timestamp" in said:
                found.append(cast("dict[str, Any]", said))
    return sorted(found, key=lambda said: said["timestamp"])


def traces(lines: Iterable[Mapping[str, Any]]) -> dict[str, list[Observed]]:
    """Request id -> what was observed of it, by time."""
    found: dict[str, list[Observed]] = {}
    for line in lines:
        is_told = line["event"] == "told" and line.get("code") != ErrorCode.SUPERSEDED  # that is one reader's end alone
        if (line["event"] == "reported" and line["what"] in REPORTS) or is_told:
            observed = Observed(
                at=line["timestamp"],
                by=line.get("process", line["role"]),
                what=line["what"],
                attempt=line["attempt"] or 0,
                state=line.get("state"),
            )
            found.setdefault(line["request_id"], []).append(observed)
    return found


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request may be. Once it has ended its workers still report what they did until they heard of it:
    `state` is then the one that they brought it to.
    """

    attempt: int
    state: RequestState
    has_ended: bool = False


_BEGIN = Place(1, RequestState.QUEUED)


def violations(trace: list[Observed]) -> list[str]:
    """Each observation that the table does not allow where it stands; the walk goes on as if it had not been."""
    problems: list[str] = []
    highest = max((observed.attempt for observed in trace), default=1) + 1
    places = _closure({_BEGIN}, highest)
    ever = set(places)
    reserved: set[int] = set()
    for observed in trace:
        if observed.what not in REPORTS:
            is_possible = any(_is_told_of(place, observed) for place in ever)
        else:
            after = _reported(places, observed)
            # Also what is fenced as late was once in time.
            is_possible = bool(after) and (observed.what not in BEHIND_A_RESERVATION or observed.attempt in reserved)
            if observed.what == "reserved":
                reserved.add(observed.attempt)
            places = _closure(after, highest) if after else places
            ever |= places
        if not is_possible:
            where = sorted(f"{place.attempt} {place.state}{' (ended)' * place.has_ended}" for place in places)
            problems.append(f"{observed} is not possible in {where}")
    return problems + _out_of_order(trace)


def _is_told_of(place: Place, observed: Observed) -> bool:
    """May the scheduler have said this here? It is heard later, and has to have been true of then."""
    if observed.what == "Outcome":
        is_finish = observed.state == RequestState.FINISHED
        return place.has_ended and is_finish == (place.state is RequestState.FINISHED)
    if place.has_ended or place.state not in TOLD_STATES[observed.what]:
        return False
    match observed.what:
        case "Placed":
            return place.attempt == observed.attempt
        case "Requeued":
            return place.attempt > observed.attempt
        case _:
            return True


def _out_of_order(trace: list[Observed]) -> list[str]:
    """A gateway hears of growing attempts, and nothing behind an outcome."""
    problems: list[str] = []
    last = 0
    outcome: Observed | None = None
    for observed in trace:
        if observed.what in REPORTS:
            continue
        # Each reader of a resumable answer is told.
        if outcome is not None and (observed.what, observed.state) != (outcome.what, outcome.state):
            problems.append(f"{observed} was told after {outcome}")
        if observed.what == "Outcome":
            outcome = observed
        elif observed.attempt and observed.attempt < last:
            problems.append(f"{observed} was told after attempt {last}")
        last = max(last, observed.attempt)
    return problems


def _reported(places: set[Place], observed: Observed) -> set[Place]:
    event = REPORTS[observed.what]
    found: set[Place] = set()
    for place in places:
        if observed.attempt < place.attempt:
            found.add(place)  # fenced: nothing changes
        elif observed.attempt == place.attempt:
            found |= _step(place, event)
            if event is events.ReserveRefused:  # nothing is held: the word may die with its scheduler, and the next
                found.add(place)  # one places the same attempt again
    if found and event is events.ReserveRefused:  # or, where the record is lost with it, begins at the first
        found |= {place for place in places if place.attempt < observed.attempt and place.state in UNHELD_STATES}
    return found


def _step(place: Place, event: type[events.Event]) -> set[Place]:
    row = TABLE.get((place.state, event))
    if row is None:
        return {place} if (place.state, event) in IGNORED else set()
    return {_moved(place, after) for after in row.nexts}


def _moved(place: Place, after: RequestState) -> Place:
    if after is RequestState.FINISHED:
        return Place(place.attempt, after, has_ended=True)
    if after in TERMINAL_STATES or after is RequestState.ABORTING:
        return replace(place, has_ended=True)
    if after is RequestState.QUEUED and place.state is not RequestState.QUEUED:
        return place if place.has_ended else Place(place.attempt + 1, after)
    return replace(place, state=after)


def _closure(places: set[Place], highest: int) -> set[Place]:
    """With all that may have happened unseen, up to this attempt."""
    found, todo = set(places), list(places)
    while todo:
        place = todo.pop()
        for event in SEEN_BY_NOBODY:
            row = TABLE.get((place.state, event))
            is_possible = event is not events.AnswerComplete or place.attempt > 1  # nothing was delivered before
            for after in row.nexts if row is not None and is_possible else ():
                moved = _moved(place, after)
                if moved not in found and moved.attempt <= highest:
                    found.add(moved)
                    todo.append(moved)
    return found
