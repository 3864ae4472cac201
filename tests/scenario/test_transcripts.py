"""Transcripts of the scheduler's core: a command, `----`, its effects in order, an empty line.

`PYTHONPATH=. python tests/scenario/test_transcripts.py --rewrite` accepts what the core does now.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.core import CoreLimits, SchedulerCore
from scheduler.messages import (
    AbortJob,
    AckEvents,
    AttemptFailedTold,
    CancelAsked,
    CloseSession,
    CloseStream,
    CoreEffect,
    CoreEvent,
    DeliveredTold,
    DrainStarted,
    HeartbeatTold,
    InventoryEntry,
    InventoryTold,
    KvCommittedTold,
    Noted,
    OutcomeTold,
    PersistRecord,
    PlacedTold,
    PreemptedTold,
    PrefillDoneTold,
    PrefillJob,
    QueuedTold,
    RecordsFound,
    Refused,
    ReleasedTold,
    ReleaseJob,
    ReportTold,
    RequestEnded,
    RequestReleased,
    RequestRequeued,
    RequeuedTold,
    ReservedTold,
    ReserveJob,
    ReserveRefusedTold,
    Resign,
    RewriteRecords,
    SendCommand,
    SequenceDoneTold,
    SessionClosed,
    SessionId,
    SessionOpened,
    StartReceived,
    StateBack,
    StateLost,
    StateRewritten,
    StreamClosed,
    StreamId,
    Tell,
    Ticked,
    Wasted,
    WelcomeWorker,
    WorkerReport,
    Written,
)
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId, RequestKey, TokenId, TransferId, WorkerId
from shared.domain.lifecycle_events import WriteStep
from shared.domain.request import (
    CancelReason,
    FinishReason,
    RequestSpec,
    RequestState,
    Role,
    SequenceState,
    StoredRequest,
)
from shared.domain.sampling import SamplingParams
from shared.domain.worker import Capacity, KvTarget, LossLimits, Work, WorkerFacts, WorkerRef

FOLDER = Path(__file__).parent / "scheduler"
TRANSCRIPTS = sorted(FOLDER.glob("*.txt"))
SEPARATOR = "----"
LIMITS = CoreLimits(max_queued_requests=3, max_queued_prompt_tokens=1000, loss=LossLimits(), gateway_grace_s=5.0)


class Runner:
    """Plays one transcript."""

    def __init__(self) -> None:
        self.core = SchedulerCore(LIMITS, Epoch(100))
        self.now = 0.0
        self.last_id = 0
        self.sessions: dict[str, SessionId] = {}
        self.numbers: dict[str, int] = {}
        self.names: dict[int, str] = {}
        self.streams: dict[str, StreamId] = {}
        self.targets: dict[str, KvTarget] = {}

    def play(self, line: str) -> list[str]:
        """The effects of one command, a line each."""
        verb, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        commands: dict[str, Callable[[list[str], dict[str, str]], Iterable[CoreEvent]]] = {
            "limits": self.limits,
            "adopt": self.adopt,
            "worker": self.worker,
            "start": self.start,
            "wrote": self.wrote,
            "report": self.report,
            "heartbeat": self.heartbeat,
            "cancel": lambda plain, _: [CancelAsked(request_id=RequestId(plain[0]), reason=CancelReason(plain[1]))],
            "delivered": self.delivered,
            "session-closed": lambda plain, _: [SessionClosed(session=self.sessions[plain[0]])],
            "stream-closed": lambda plain, _: [StreamClosed(stream=self.streams[plain[0]])],
            "tick": self.tick,
            "pause": self.pause,
            "redis": self.redis,
            "drain": lambda _plain, _options: [DrainStarted()],
        }
        shown: list[str] = []
        for event in commands[verb](plain, options):
            shown += [self.show(effect) for effect in self.core.step(event, self.now)]
        self.core.waiting.check()
        return shown

    def limits(self, plain: list[str], options: dict[str, str]) -> list[CoreEvent]:
        """`limits retry_floor=1`, as the first command: bounds that are not the usual ones."""
        changed = {name: int(value) for name, value in options.items()}
        self.core = SchedulerCore(replace(LIMITS, **changed), Epoch(100))  # pyright: ignore[reportArgumentType]
        return []

    def adopt(self, plain: list[str], options: dict[str, str]) -> list[CoreEvent]:
        """`adopt a queued b/2 placing:p0:d0 c queued+session`: what the store knows, oldest first."""
        records: list[StoredRequest] = []
        for name, told in zip(plain[::2], plain[1::2], strict=True):
            key = _key(name)
            state, *workers = told.removesuffix("+session").split(":")
            records.append(
                StoredRequest(
                    request_id=key.request_id,
                    state=RequestState(state),
                    attempt=key.attempt,
                    epoch=Epoch(100),
                    gateway_incarnation=Incarnation(1),
                    admitted_unix_ms=len(records),
                    seed=1,
                    prefill_worker=WorkerId(workers[0]) if workers else None,
                    decode_worker=WorkerId(workers[1]) if workers else None,
                    session=1 if told.endswith("+session") else 0,
                )
            )
        return [RecordsFound(records=tuple(records))]

    def worker(self, plain: list[str], options: dict[str, str]) -> list[CoreEvent]:
        role, name = plain
        self.last_id += 1
        session = self.sessions[name] = SessionId(self.last_id)
        self.names[session] = name
        incarnation = int(options.get("incarnation", 1))
        if incarnation != 1 or name not in self.numbers:
            self.numbers[name] = 0
        facts = WorkerFacts(
            role=Role(role),
            ref=WorkerRef(WorkerId(name), Incarnation(incarnation)),
            address=f"{name}:1",
            admin_url="",
            pid=1,
            layout=options.get("layout", "float32").encode(),
            block_size=16,
            num_blocks=int(options["blocks"]),
            max_sequences=int(options.get("sequences", 8)),
            token_budget=int(options.get("budget", 256)),
        )
        waiting_kv = SequenceState.RUNNING if role == "prefill" else SequenceState.WAITING_KV
        named = {"holds": waiting_kv, "runs": SequenceState.RUNNING, "ended": SequenceState.DONE}
        entries = [
            InventoryEntry(key=_key(held), state=state, attach_ticket=b"" if option == "ended" else b"ticket")
            for option, state in named.items()
            for held in options.get(option, "").split(",")
            if held
        ]
        entries += [  # told its end, and its Release has not come
            InventoryEntry(
                key=_key(held),
                state=SequenceState.DONE,
                attach_ticket=b"ticket",
                last_index=3,
                finish_reason=FinishReason.STOP,
            )
            for held in options.get("finished", "").split(",")
            if held
        ]
        return [
            SessionOpened(session=session, facts=facts, epoch_seen=Epoch(int(options.get("epoch", 0)))),
            InventoryTold(session=session, entries=tuple(entries)),
        ]

    def start(self, plain: list[str], options: dict[str, str]) -> list[CoreEvent]:
        self.last_id += 1
        stream = self.streams[plain[0]] = StreamId(self.last_id)
        self.names[stream] = plain[0]
        spec = RequestSpec(
            request_id=RequestId(plain[0]),
            prompt_ids=tuple(TokenId(n) for n in range(int(options["prompt"]))),
            max_tokens=int(options["max"]),
            sampling=SamplingParams(seed=1),
        )
        return [
            StartReceived(
                stream=stream,
                spec=spec,
                gateway_incarnation=Incarnation(1),
                last_attempt_seen=Attempt(int(options.get("seen", 0))),
                last_attempt_closed=Attempt(int(options.get("closed", 0))),
                epoch_seen=Epoch(0),
                unix_ms=0,
                deadline=self.now + float(options["timeout"]) if "timeout" in options else None,
                session=int(options.get("session", 0)),
            )
        ]

    def delivered(self, plain: list[str], options: dict[str, str]) -> list[CoreEvent]:
        """`delivered a/1 ids=3`: what a gateway holds of the closed attempt; with `complete` the answer had ended."""
        key = _key(plain[0])
        return [
            DeliveredTold(
                request_id=key.request_id,
                closed_attempt=key.attempt,
                ids=tuple(TokenId(n) for n in range(int(options["ids"]))),
                complete=FinishReason.STOP if "complete" in plain else None,
            )
        ]

    def wrote(self, plain: list[str], options: dict[str, str]) -> list[CoreEvent]:
        key = _key(plain[0])
        """`ended`: its record has ended; `newer`: a scheduler of a higher epoch has written it."""
        stale = ErrorCode.STALE_ATTEMPT
        errors = {"failed": ErrorCode.STATE_UNAVAILABLE, "ended": stale, "newer": stale}
        error = next((errors[word] for word in plain if word in errors), None)
        return [
            Written(
                request_id=key.request_id,
                attempt=key.attempt,
                step=WriteStep(plain[1]),
                error=error,
                is_newer="newer" in plain,
            )
        ]

    def report(self, plain: list[str], options: dict[str, str]) -> list[CoreEvent]:
        """The next one of this worker; `again`: its last one once more, under its number."""
        name, key, kind = plain[0], _key(plain[1]), plain[2]
        self.numbers[name] += "again" not in plain
        reports: dict[str, WorkerReport] = {
            "reserved": ReservedTold(
                target=KvTarget(
                    worker_id=WorkerId(name),
                    address=f"{name}:1",
                    incarnation=Incarnation(1),
                    transfer_id=TransferId(1),
                    transports=("grpc",),
                ),
                attach_ticket=b"ticket",
            ),
            "refused": ReserveRefusedTold(free_blocks=int(options.get("free", 0))),
            "prefilled": PrefillDoneTold(computed_tokens=int(options.get("computed", 0))),
            "committed": KvCommittedTold(),
            "done": SequenceDoneTold(finish_reason=FinishReason.STOP, completion_tokens=3),
            "preempted": PreemptedTold(),
            "failed": AttemptFailedTold(error=ServingError(ErrorCode.KV_TRANSFER_FAILED, "no sign of the sender")),
            "stopping": AttemptFailedTold(error=ServingError(ErrorCode.DRAINING, "the worker is being stopped")),
            "released": ReleasedTold(
                blocks_freed=int(options.get("freed", 0)),
                work=Work(
                    computed_tokens=int(options.get("computed", 0)),
                    replayed_tokens=int(options.get("replayed", 0)),
                    undelivered_tokens=int(options.get("undelivered", 0)),
                ),
            ),
        }
        return [ReportTold(session=self.sessions[name], number=self.numbers[name], key=key, report=reports[kind])]

    def heartbeat(self, plain: list[str], options: dict[str, str]) -> list[CoreEvent]:
        capacity = Capacity(
            commands_seen=int(options.get("seen", 0)),
            blocks={"free": int(options["free"])},
            queued_prompt_tokens=int(options.get("queued", 0)),
            sequences={"running": int(options.get("running", 0))},
            is_draining="draining" in plain,
        )
        return [HeartbeatTold(session=self.sessions[plain[0]], capacity=capacity)]

    def tick(self, plain: list[str], options: dict[str, str]) -> Iterable[CoreEvent]:
        """Time passes, a tick each second; workers named after it stay silent, the others have just spoken."""
        ends_at = self.now + float(plain[0])
        while self.now < ends_at:
            self.now = min(self.now + 1.0, ends_at)
            for worker in self.core.fleet:
                if worker.worker_id not in plain[1:] and worker.session is not None:
                    worker.heard_at = self.now
            yield Ticked()

    def pause(self, plain: list[str], options: dict[str, str]) -> list[CoreEvent]:
        """The scheduler itself did not run for so long, and its tick comes before anything that waits to be read."""
        self.now += float(plain[0])
        return [Ticked()]

    def redis(self, plain: list[str], options: dict[str, str]) -> list[CoreEvent]:
        match plain[0]:
            case "lost":
                return [StateLost()]
            case "back":
                return [StateBack()]
            case _:
                written = frozenset(RequestId(name) for name in plain[1:])
                return [StateRewritten(outcomes=written, is_complete=True)]

    def show(self, effect: CoreEffect) -> str:
        match effect:
            case Tell():
                return f"tell {self.names[effect.stream]} {_message(effect.message)}"
            case SendCommand():
                kind = {ReserveJob: "reserve", PrefillJob: "prefill", AbortJob: "abort", ReleaseJob: "release"}
                return f"send {effect.worker_id} #{effect.number} {kind[type(effect.body)]} {effect.key}{_more(effect)}"
            case PersistRecord(stored=stored, step=step):
                return f"persist {stored.request_id}/{stored.attempt} {step.value} ({stored.state.value})"
            case RewriteRecords():
                told = [f"{stored.request_id} ({stored.state.value})" for stored in effect.records]
                return " ".join(["rewrite", *told])
            case RequestEnded():
                return f"ended {effect.record.request_id} {effect.record.state.value}"
            case RequestReleased():
                after = "" if effect.cancel_release_s is None else f" after {effect.cancel_release_s:g} s"
                return f"released {effect.request_id}{after}"
            case RequestRequeued():
                return f"requeued {effect.key} {effect.reason}"
            case WelcomeWorker() | AckEvents() | CloseSession():
                rest = f" {effect.upto}" if isinstance(effect, AckEvents) else ""
                rest = f" ({effect.reason})" if isinstance(effect, CloseSession) else rest
                kind = {WelcomeWorker: "welcome", AckEvents: "ack", CloseSession: "close-session"}[type(effect)]
                return f"{kind} {self.names[effect.session]}{rest}"
            case CloseStream():
                return f"close-stream {self.names[effect.stream]}"
            case Refused():
                return f"count {effect.kind.value.lower()}"
            case Noted():
                return " ".join(
                    ["note", effect.what, effect.worker_id or effect.request_id or "", effect.reason]
                ).strip()
            case Wasted(waste=waste):
                return f"wasted {waste.num_tokens} {waste.cause.value} {waste.stage.value}"
            case Resign():
                return f"resign ({effect.reason})"


def _more(effect: SendCommand) -> str:
    match effect.body:
        case ReserveJob(delivered_ids=ids) if ids:
            return f" behind {len(ids)}"
        case PrefillJob(num_delivered=number) if number:
            return f" behind {number}"
        case _:
            return ""


def _message(message: QueuedTold | RequeuedTold | PlacedTold | OutcomeTold) -> str:
    match message:
        case RequeuedTold():
            return f"requeued {message.attempt} ({message.reason})"
        case QueuedTold():
            return f"queued {message.position}"
        case PlacedTold():
            return f"placed {message.attempt} {message.prefill_worker} {message.target.worker_id}"
        case OutcomeTold(outcome=outcome):
            why = "" if outcome.error is None else f" {outcome.error}"
            return f"{outcome.state.value}{why}"


def _key(text: str) -> RequestKey:
    request_id, _, attempt = text.partition("/")
    return RequestKey(RequestId(request_id), Attempt(int(attempt or 1)))


def play(text: str) -> str:
    """The transcript with the effects of now."""
    runner, out = Runner(), list[str]()
    is_effects = False
    for line in text.splitlines():
        if line.startswith("#"):
            out.append(line)
        elif line in ("", SEPARATOR):
            is_effects = line == SEPARATOR
        elif not is_effects:
            out += [line, SEPARATOR, *runner.play(line), ""]
    return "\n".join(out)


def test_there_are_transcripts() -> None:
    """An empty folder would pass everything."""
    assert TRANSCRIPTS


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path) -> None:
    """The core does what is written, in this order and nothing else."""
    text = path.read_text()

    assert text == play(text)


if __name__ == "__main__" and sys.argv[1:] == ["--rewrite"]:
    for each in TRANSCRIPTS:
        each.write_text(play(each.read_text()))
