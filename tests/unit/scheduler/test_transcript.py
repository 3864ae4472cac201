"""What a core was told is written down, and a new core answers it in the same way."""

import json
import stat
from pathlib import Path

import pytest

from scheduler import transcript
from scheduler.core import CoreLimits, SchedulerCore
from scheduler.messages import CancelAsked, CoreEvent, HeartbeatTold, SessionId, SessionOpened, StartReceived, StreamId
from scheduler.transcript import Transcript, plain
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId, TokenId, WorkerId
from shared.domain.request import CancelReason, RequestSpec, Role
from shared.domain.sampling import SamplingParams
from shared.domain.worker import Capacity, LossLimits, WorkerFacts, WorkerRef
from tests.support.core_replay import replay, restored

EPOCH = Epoch(7)
LIMITS = CoreLimits(max_queued_requests=3, max_queued_prompt_tokens=99, loss=LossLimits(), gateway_grace_s=5.0)
FACTS = WorkerFacts(
    role=Role.DECODE,
    ref=WorkerRef(WorkerId("d"), Incarnation(2**64 - 1)),
    address="a",
    admin_url="",
    pid=1,
    layout=b"\x00\xff",
    block_size=16,
    num_blocks=8,
    max_sequences=4,
    token_budget=32,
)
SPEC = RequestSpec(
    request_id=RequestId("r"), prompt_ids=(TokenId(1), TokenId(2)), max_tokens=3, sampling=SamplingParams(seed=1)
)
EVENTS: tuple[CoreEvent, ...] = (
    SessionOpened(session=SessionId(1), facts=FACTS, epoch_seen=Epoch(0)),
    HeartbeatTold(session=SessionId(1), capacity=Capacity(commands_seen=0, blocks={"free": 8}, queued_prompt_tokens=0)),
    StartReceived(
        stream=StreamId(2),
        spec=SPEC,
        gateway_incarnation=Incarnation(3),
        last_attempt_seen=Attempt(0),
        epoch_seen=Epoch(0),
        unix_ms=5,
    ),
    CancelAsked(request_id=RequestId("r"), reason=CancelReason.DELETE),
)


def recorded(folder: Path) -> Path:
    """A core is told EVENTS, a second apart, and everything is written down."""
    core, written = SchedulerCore(LIMITS, EPOCH), Transcript(folder, EPOCH, LIMITS)
    for now, event in enumerate(EVENTS):
        written.add(event, float(now), core.step(event, float(now)))
    written.close()
    (path,) = folder.iterdir()
    return path


def test_a_new_core_answers_as_the_first(tmp_path: Path) -> None:
    """Every step is there, and the file is its owner's alone: it holds prompts."""
    path = recorded(tmp_path)
    assert len(EVENTS) == replay(path)
    assert "core-7.jsonl" == path.name
    assert 0 == stat.S_IMODE(path.stat().st_mode) & 0o077


def test_a_step_cut_short_is_left_out(tmp_path: Path) -> None:
    """A process that is killed while it writes leaves half a line."""
    path = recorded(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    assert len(EVENTS) - 1 == replay(path)


def test_another_answer_is_found(tmp_path: Path) -> None:
    """A recorded step whose effects are not those of the core, by their digest."""
    path = recorded(tmp_path)
    head, first, *others = path.read_text().splitlines()
    changed = {**json.loads(first), "digest": "0" * 32}
    path.write_text("\n".join([head, json.dumps(changed), *others, ""]))
    with pytest.raises(AssertionError, match="step 1, SessionOpened"):
        replay(path)


def test_it_stops_where_the_file_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is not filled by a setting that was left on."""
    monkeypatch.setattr(transcript, "MAX_BYTES", 600)
    path = recorded(tmp_path)
    assert path.stat().st_size < 1600
    assert len(EVENTS) > replay(path)


@pytest.mark.parametrize(
    "value",
    [
        *EVENTS,
        (1, "a", None, 0.5, True, b"\x01"),
        frozenset({RequestId("a"), RequestId("b")}),
        {1: (2, 3), "x": ErrorCode.INTERNAL},
        ServingError(ErrorCode.OVERLOADED, "full", param="p", retry_after_s=3),
    ],
    ids=repr,
)
def test_values_come_back_as_they_were(value: object) -> None:
    """Through JSON and back: equal, and enums are enums again."""
    assert value == restored(json.loads(json.dumps(plain(value))))


def test_what_cannot_be_told_is_refused() -> None:
    """Better no file than one that does not say what was."""
    with pytest.raises(TypeError, match="object cannot be recorded"):
        plain(object())
