"""Plays what a scheduler's core was told once more, through a new core, and compares every answer."""

import json
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, cast

from scheduler import core as scheduler_core
from scheduler import messages
from scheduler.core import CoreLimits, SchedulerCore
from scheduler.messages import CoreEvent
from scheduler.transcript import digest, plain
from shared.domain import errors as errors_module
from shared.domain import lifecycle, lifecycle_events, request, sampling, worker
from shared.domain.errors import ServingError
from shared.domain.ids import Epoch

MODULES = (messages, scheduler_core, lifecycle, lifecycle_events, request, sampling, worker, errors_module)
CLASSES: Mapping[str, Callable[..., Any]] = {
    name: value for module in MODULES for name, value in vars(module).items() if isinstance(value, type)
}


def restored(value: Any) -> Any:
    """The value of which `plain` made this. Raises KeyError for a class that is not known here."""
    if isinstance(value, list):
        return tuple(restored(member) for member in cast("list[Any]", value))
    if not isinstance(value, dict):
        return value
    document = cast("dict[str, Any]", value)
    if "$enum" in document:
        kind = CLASSES[document["$enum"]]
        assert isinstance(kind, type)
        assert issubclass(kind, Enum)
        return kind(document["value"])
    if "$bytes" in document:
        return bytes.fromhex(document["$bytes"])
    if "$error" in document:
        code, message, param, retry_after_s = restored(document["$error"])
        return ServingError(code, message, param=param, retry_after_s=retry_after_s)
    if "$set" in document:
        return frozenset(restored(document["$set"]))
    if "$map" in document:
        return dict(restored(document["$map"]))
    return CLASSES[document["$"]](**{name: restored(member) for name, member in document.items() if name != "$"})


def replay(path: Path) -> int:
    """Steps that were played. Raises AssertionError at the first whose effects are not those of the recording."""
    lines = path.read_bytes().split(b"\n")
    # What follows the last line end is nothing, or the line in whose midst the process was killed.
    head, *steps = [json.loads(line) for line in lines[:-1]]
    limits = restored(head["limits"])
    assert isinstance(limits, CoreLimits)
    core = SchedulerCore(limits, Epoch(head["epoch"]))
    for number, step in enumerate(steps, start=1):
        event = cast("CoreEvent", restored(step["event"]))
        assert plain(event) == step["event"], f"{path.name}, step {number}: the event is not restored as it was"
        effects = core.step(event, step["now"])
        assert step["digest"] == digest(effects), (
            f"{path.name}, step {number}, {type(event).__name__}: {effects}, recorded were {step['effects']}"
        )
    return len(steps)
