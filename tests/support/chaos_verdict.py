"""Judges a run under fault by what its clients saw, what its processes logged, and what its schedulers recorded."""

import json
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.support import core_replay, life_traces
from tests.support.chaos_client import End, Seen
from tests.support.chaos_expectations import is_explained, may_be_unknown, may_end_twice, may_lack_its_line
from tests.support.chaos_figures import Figures
from tests.support.chaos_load import Question
from tests.support.chaos_run import Done
from tests.support.chaos_schedule import ACTIVE_SCHEDULER, FaultKind, Schedule
from tests.support.life_traces import log_lines


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
    problems = [*_client_problems(done, lines), *_outcome_problems(done, lines)]
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
        ends=Counter(f"{seen.end} {seen.code}".strip() for seen in done.seen),
        faults=Counter(
            (fault.kind.value, fault.target)
            for fault in done.applied
            if fault.kind is not FaultKind.STARVED or fault.target == ACTIVE_SCHEDULER  # one for each process
        ),
        requeues=Counter(line["reason"] for line in lines if line["event"] == "requeued"),
        resumed=sum(seen.num_resumed > 0 for seen in done.seen),
        observed=sum(map(len, observed.values())),
        steps_replayed=steps,
        schedulers=len(recordings),
    )
    return problems, figures


def _client_problems(done: Done, lines: list[dict[str, Any]]) -> list[str]:
    problems: list[str] = []
    for seen, question in zip(done.seen, done.schedule.questions, strict=True):
        found: list[str] = []
        if seen.end is End.WRONG:
            found.append(str(seen))
        elif seen.end in (End.FAILED, End.CUT) and not is_explained(seen, question, done.applied):
            found.append(f"{seen}, which no fault explains")
        if seen.delete_status == 404 and not may_be_unknown(seen, done.applied):
            found.append(f"{seen}; its DELETE found nothing")
        if found:
            problems += [*found, f"    {question}", *_said_of(seen.record.request_id, lines)]
    return problems


def _said_of(request_id: str, lines: list[dict[str, Any]]) -> list[str]:
    """Each line of each process about one request: who looks for the reason begins there."""
    about = [line for line in lines if request_id and request_id in json.dumps(line)]
    plain = ("timestamp", "process", "role", "level", "component", "client_request_id", "request_id")
    told = [
        {name: value for name, value in line.items() if name not in plain and value not in (None, 0)} for line in about
    ]
    return [
        f"    {line['timestamp']} {line.get('process', line['role'])} {json.dumps(rest)}"
        for line, rest in zip(about, told, strict=True)
    ]


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
    for seen, question, asked in zip(done.seen, done.schedule.questions, done.asked, strict=True):
        own_lines = written.get(seen.client_request_id, [])
        said = [line["outcome"] for line in own_lines]
        allowed = _outcomes_for(seen)
        if not said and not (question.is_resumable or None in allowed or may_lack_its_line(seen, done.applied)):
            problems.append(f"{seen}; the gateway wrote nothing")
        is_other = not question.is_resumable and not all(_may_be_written(line, allowed) for line in own_lines)
        if len(said) > _max_lines(question) or is_other:
            problems.append(f"{seen}; the gateway wrote {said}")
        for line in own_lines:
            counted = line["completion_tokens"]
            whole = asked.completion_tokens * (1 if "." in line["request_id"] else question.num_choices)
            if line["outcome"] == "finished" and counted != whole and not question.is_resumable:
                problems.append(f"{seen}; the gateway counted {counted} tokens, not {whole}")
        for request_id in {line["request_id"] for line in own_lines}:
            schedulers = ended.get(request_id, [])
            num_allowed = len(set(schedulers)) if may_end_twice(seen, done.applied) else 1
            if len(schedulers) > num_allowed:
                problems.append(f"{seen}; ended by {schedulers}")
    return problems


def _max_lines(question: Question) -> int:
    """Each reader of a resumable answer has a line; several answers to one question have one each, and one together."""
    if question.is_resumable:
        return 1_000
    return 1 if question.num_choices == 1 else 1 + question.num_choices


def _may_be_written(line: Mapping[str, Any], allowed: tuple[str | None, ...]) -> bool:
    """One of several answers may be complete where another has failed, and the whole with it."""
    return line["outcome"] in allowed or (line["outcome"] == "finished" and "." in line["request_id"])


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
