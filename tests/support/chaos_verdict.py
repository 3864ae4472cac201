"""Judges a run under fault by what its clients saw, what its processes logged, and what its schedulers recorded."""

from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tests.support import core_replay, life_traces
from tests.support.chaos_client import End, Seen
from tests.support.chaos_expectations import is_explained, may_end_twice, may_lack_its_line
from tests.support.chaos_run import Done
from tests.support.chaos_schedule import Schedule
from tests.support.life_traces import log_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What a run came to."""

    seconds: float
    requests: int
    ends: Mapping[str, int]
    faults: Mapping[str, int]
    requeues: Mapping[str, int]
    resumed: int
    observed: int
    steps_replayed: int
    schedulers: int

    def __str__(self) -> str:
        parts = [
            f"{name} {count}" for group in (self.ends, self.faults, self.requeues) for name, count in group.items()
        ]
        return (
            f"{self.seconds:.0f} s, {self.requests} requests, {self.resumed} resumed, {self.observed} observations, {self.steps_replayed} steps "
            f"of {self.schedulers} schedulers replayed: {', '.join(parts)}"
        )


@contextmanager
def schedule_shown_if_it_fails(schedule: Schedule) -> Generator[None]:
    """Whatever goes wrong within is preceded by all that happened."""
    try:
        yield
    except BaseException:
        print(schedule)
        raise


def show(schedule: Schedule, figures: Figures) -> None:
    """A line for the people who read `make chaos`."""
    print(f"seed {schedule.seed}, KV by {schedule.transport}: {figures}")


def judge(done: Done) -> tuple[list[str], Figures]:
    """All that is wrong (empty: nothing), and the figures."""
    lines = log_lines(done.log_folder)
    observed = life_traces.traces(lines)
    problems = [*_client_problems(done), *_outcome_problems(done, lines)]
    for request_id, trace in observed.items():
        found = life_traces.violations(trace)
        problems += [f"{request_id}: {violation}" for violation in found]
        if found:
            problems += [f"    {step}" for step in trace]
    problems += [
        f"{line.get('process', line['role'])}: {line['event']}: {line.get('exception', '')}"
        for line in lines
        if _is_bug(line)
    ]
    steps = 0
    recordings = sorted(done.transcripts.glob("*.jsonl"))
    for recording in recordings:
        try:
            steps += core_replay.replay(recording)
        except AssertionError as error:
            problems.append(str(error))
    figures = Figures(
        seconds=done.schedule.duration_s,
        requests=len(done.seen),
        ends=Counter(f"{seen.end} {seen.code}".strip() for seen in done.seen),
        faults=Counter(f"{fault.kind} {fault.target}".strip() for fault in done.applied),
        requeues=Counter(f"requeued {line['reason']}" for line in lines if line["event"] == "requeued"),
        resumed=sum(seen.num_resumed > 0 for seen in done.seen),
        observed=sum(map(len, observed.values())),
        steps_replayed=steps,
        schedulers=len(recordings),
    )
    return problems, figures


def _client_problems(done: Done) -> list[str]:
    problems: list[str] = []
    for seen, question in zip(done.seen, done.schedule.questions, strict=True):
        if seen.end is End.WRONG:
            problems.append(str(seen))
        elif seen.end in (End.FAILED, End.CUT) and not is_explained(seen, question, done.applied):
            problems.append(f"{seen}, which no fault explains")
    return problems


def _outcome_problems(done: Done, lines: list[dict[str, Any]]) -> list[str]:
    """One outcome at the gateway for each request that reached it, the one that the client saw; at most one elsewhere."""
    problems: list[str] = []
    written: dict[str, list[dict[str, Any]]] = {}
    ended: dict[str, list[str]] = {}
    for line in lines:
        if line["event"] == "request" and line.get("client_request_id"):
            written.setdefault(line["client_request_id"], []).append(line)
        elif line["event"] == "request ended":
            ended.setdefault(line["request_id"], []).append(line["process"])
    for seen, question in zip(done.seen, done.schedule.questions, strict=True):
        own_lines = written.get(seen.client_request_id, [])
        said = [line["outcome"] for line in own_lines]
        allowed = _outcomes_for(seen)
        if not said and not (question.is_resumable or None in allowed or may_lack_its_line(seen, done.applied)):
            problems.append(f"{seen}; the gateway wrote nothing")
        # Each reader of a resumable answer has a line: those before the last were cut.
        if (len(said) > 1 and not question.is_resumable) or (
            said and not question.is_resumable and said[0] not in allowed
        ):
            problems.append(f"{seen}; the gateway wrote {said}")
        for request_id in {line["request_id"] for line in own_lines}:
            schedulers = ended.get(request_id, [])
            num_allowed = len(set(schedulers)) if may_end_twice(seen, done.applied) else 1
            if len(schedulers) > num_allowed:
                problems.append(f"{seen}; ended by {schedulers}")
    return problems


def _outcomes_for(seen: Seen) -> tuple[str | None, ...]:
    """What the gateway may have written of a request that ended so for its client; None = it never came to the gateway."""
    match seen.end:
        case End.FINISHED:
            return ("finished",)
        case End.FAILED:
            return ("failed", "cancelled")
        case _:
            return ("finished", "failed", "cancelled", None)


def _is_bug(line: Mapping[str, Any]) -> bool:
    """An exception that nobody expected, or an event that the table does not know."""
    if line["event"] == "process failed":  # a scheduler that was replaced ends so, on purpose
        return "Replaced" not in line.get("exception", "")
    return "exception" in line or "illegal" in line["event"].lower()
