"""A record of all that a core was told and of what it answered, so that its decisions can be looked at again.

Off by default, and for tests and for finding faults alone: events carry prompts as token ids. One file a scheduler
epoch, one JSON line a step: the time, the event, and a digest of the effects. `tests.support.core_replay` plays it.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from hashlib import blake2b
from pathlib import Path
from typing import cast

from scheduler.messages import CoreEffect, CoreEvent
from shared.domain.errors import ServingError
from shared.domain.ids import Epoch

MAX_BYTES = 1024 * 1024 * 1024  # hours of a busy system; a disk is not filled because a setting was left on
OWNER_ONLY = 0o600


class Transcript:
    """Writes each step at once, so that a process that is killed leaves all of its steps but the last."""

    def __init__(self, folder: Path, epoch: Epoch, limits: object) -> None:
        """Raises OSError where the folder cannot be written."""
        path = folder / f"core-{epoch}.jsonl"
        path.touch(OWNER_ONLY)
        self._file = path.open("wb", buffering=0)
        self._num_bytes = 0
        self._write({"epoch": epoch, "limits": plain(limits)})

    def add(self, event: CoreEvent, now: float, effects: tuple[CoreEffect, ...]) -> None:
        """One step."""
        kinds = [type(effect).__name__ for effect in effects]
        self._write({"now": now, "event": plain(event), "effects": kinds, "digest": digest(effects)})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: Mapping[str, object]) -> None:
        if self._num_bytes < MAX_BYTES:
            self._num_bytes += self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n") or 0


def digest(effects: tuple[CoreEffect, ...]) -> str:
    """Of everything in the effects, in their order."""
    return blake2b(json.dumps(plain(effects)).encode(), digest_size=16).hexdigest()


def plain(value: object) -> object:
    """As JSON that says of each value what it was. Raises TypeError for what no event and no effect has."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Enum):
        return {"$enum": type(value).__name__, "value": value.value}
    if isinstance(value, bytes):
        return {"$bytes": value.hex()}
    if isinstance(value, ServingError):
        said = (value.code, value.message, value.param, value.retry_after_s)
        return {"$error": [plain(member) for member in said]}
    if isinstance(value, tuple):
        return [plain(member) for member in cast("tuple[object, ...]", value)]
    if isinstance(value, frozenset | set):
        return {"$set": sorted((plain(member) for member in cast("frozenset[object]", value)), key=json.dumps)}
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {"$map": [[plain(key), plain(member)] for key, member in items]}
    if is_dataclass(value):
        members = {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        return {"$": type(value).__name__, **members}
    raise TypeError(f"{type(value).__name__} cannot be recorded")
