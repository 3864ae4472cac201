"""What goes into `SchedulerCore.step` and what comes out. Values only: no wire, no loop, no clock.

Streams (one per Serve call) and sessions (one per worker connection) are named by numbers that the service gives out.
"""

from dataclasses import dataclass
from typing import NewType, TypeAlias

from scheduler.waste import Waste
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId, RequestKey, TokenId, WorkerId
from shared.domain.lifecycle import RequestRecord
from shared.domain.lifecycle_events import WriteStep
from shared.domain.refusals import RefusedKind
from shared.domain.request import CancelReason, FinishReason, Outcome, RequestSpec, SequenceState, StoredRequest
from shared.domain.worker import NO_WORK, Capacity, KvTarget, Work, WorkerFacts

StreamId = NewType("StreamId", int)
SessionId = NewType("SessionId", int)
NO_ATTEMPT = Attempt(0)

# ---- in: gateways


@dataclass(frozen=True, slots=True, kw_only=True)
class StartReceived:
    """The first message of a Serve stream; for a known request, the return of its gateway."""

    stream: StreamId
    spec: RequestSpec
    gateway_incarnation: Incarnation
    last_attempt_seen: Attempt
    last_attempt_closed: Attempt = NO_ATTEMPT
    """Of which the gateway takes nothing more: another scheduler has told it so."""
    epoch_seen: Epoch
    unix_ms: int
    deadline: float | None = None
    """When the client's time is over, by the clock of `step`."""
    session: int = 0
    """Of the gateway's; above 0 the answer can be resumed by a higher one."""
    key_hash: str = ""
    """Of the client's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAsked:
    """By message, by RPC or by a mark in Redis; who asks may. Unknown and ended requests are left alone."""

    request_id: RequestId
    reason: CancelReason


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveredTold:
    """A gateway's answer to Requeued. With `complete` the answer had ended, for that reason."""

    request_id: RequestId
    closed_attempt: Attempt
    ids: tuple[TokenId, ...]
    complete: FinishReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamClosed:
    """A Serve stream is over, for whatever reason. Starts the grace of a request that still runs."""

    stream: StreamId


# ---- in: workers


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """A worker said hello."""

    session: SessionId
    facts: WorkerFacts
    epoch_seen: Epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryEntry:
    """One attempt that a worker holds or has ended lately; what follows the state is decode's."""

    key: RequestKey
    state: SequenceState
    attach_ticket: bytes = b""
    last_index: int = 0
    finish_reason: FinishReason | None = None
    """Set once SequenceDone has been told."""

    @property
    def is_held(self) -> bool:
        """False where only the memory of its end is left."""
        return self.state is not SequenceState.DONE or bool(self.attach_ticket)


@dataclass(frozen=True, slots=True, kw_only=True)
class InventoryTold:
    """All that a worker holds. Follows the hello and the unacknowledged events; commands flow after it."""

    session: SessionId
    entries: tuple[InventoryEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatTold:
    """A worker's capacity, with how many commands it had seen."""

    session: SessionId
    capacity: Capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservedTold:
    """Decode holds blocks for the whole job."""

    target: KvTarget
    attach_ticket: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRefusedTold:
    """Decode had too few blocks."""

    free_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDoneTold:
    """The last chunk is computed."""

    computed_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCommittedTold:
    """KV and token 1 are at decode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDoneTold:
    """The sequence ended and its outbox is empty."""

    finish_reason: FinishReason
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptedTold:
    """Decode gave the blocks to others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailedTold:
    """The worker could not go on with it."""

    error: ServingError


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasedTold:
    """Answer to Abort and Release."""

    blocks_freed: int
    work: Work = NO_WORK


WorkerReport: TypeAlias = (
    ReservedTold
    | ReserveRefusedTold
    | PrefillDoneTold
    | KvCommittedTold
    | SequenceDoneTold
    | PreemptedTold
    | AttemptFailedTold
    | ReleasedTold
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportTold:
    """A numbered event of a worker; sent again until acknowledged."""

    session: SessionId
    number: int
    key: RequestKey
    report: WorkerReport


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClosed:
    """The stream of a worker is over."""

    session: SessionId


# ---- in: the record store, time, the process


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsFound:
    """The live records of an earlier scheduler, oldest first, now written under our epoch. Comes before all else."""

    records: tuple[StoredRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A Persist came to its end. `error` None = the record is in Redis."""

    request_id: RequestId
    attempt: Attempt
    step: WriteStep
    error: ErrorCode | None = None
    is_newer: bool = False
    """It was refused because a scheduler of a higher epoch has written the record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLost:
    """Redis did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBack:
    """Redis answers again; it may have lost everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRewritten:
    """A Rewrite came to its end; `outcomes` are the ended ones among those written: they are owed no more.

    One that was written as live and has ended meanwhile is not among them.
    """

    outcomes: frozenset[RequestId]
    is_complete: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """Time has passed: lost workers, graces, requests that nobody can serve, queue positions, forgetting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainStarted:
    """Take no new request."""


CoreEvent: TypeAlias = (
    StartReceived
    | CancelAsked
    | DeliveredTold
    | StreamClosed
    | SessionOpened
    | InventoryTold
    | HeartbeatTold
    | ReportTold
    | SessionClosed
    | RecordsFound
    | Written
    | StateLost
    | StateBack
    | StateRewritten
    | Ticked
    | DrainStarted
)

# ---- out: gateways


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedTold:
    """Waits behind `position` others."""

    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeuedTold:
    """The attempt is closed; DeliveredTold answers."""

    attempt: Attempt
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedTold:
    """Where to attach."""

    attempt: Attempt
    target: KvTarget
    attach_ticket: bytes
    prefill_worker: WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class OutcomeTold:
    """How it ended."""

    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Tell:
    """Send on a Serve stream. After an OutcomeTold the stream ends."""

    stream: StreamId
    message: QueuedTold | RequeuedTold | PlacedTold | OutcomeTold


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseStream:
    """A newer stream of the same request took over."""

    stream: StreamId


# ---- out: workers


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveJob:
    """To decode: the whole job. What is delivered is replayed, then continued."""

    spec: RequestSpec
    delivered_ids: tuple[TokenId, ...] = ()
    deadline: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillJob:
    """To prefill: the prompt and where its KV goes."""

    spec: RequestSpec
    target: KvTarget
    num_delivered: int = 0
    """Above 0: token 1 exists, none is sampled."""
    deadline: float | None = None
    distrusts_cache: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AbortJob:
    """Stop, free, answer Released."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseJob:
    """The attempt is over: free what is left, answer Released."""


CommandBody: TypeAlias = ReserveJob | PrefillJob | AbortJob | ReleaseJob


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCommand:
    """Send on a session. Numbered from 1 per session, in order."""

    session: SessionId
    worker_id: WorkerId
    number: int
    key: RequestKey
    body: CommandBody


@dataclass(frozen=True, slots=True, kw_only=True)
class WelcomeWorker:
    """First message on a session."""

    session: SessionId


@dataclass(frozen=True, slots=True, kw_only=True)
class AckEvents:
    """Every event up to this number is taken."""

    session: SessionId
    upto: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    """End a session from our side."""

    session: SessionId
    reason: str


# ---- out: the record store, counters, the process


@dataclass(frozen=True, slots=True, kw_only=True)
class PersistRecord:
    """Write, then answer with Written. What must wait for the write is not among the effects: it follows Written.

    Writes of one request are performed in the order given.
    """

    stored: StoredRequest
    step: WriteStep


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteRecords:
    """Redis is back: write all of these whatever is there, then answer with StateRewritten."""

    records: tuple[StoredRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestEnded:
    """A request reached its outcome: count it, log its one line."""

    record: RequestRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestReleased:
    """Nothing of a request is held anywhere any more."""

    request_id: RequestId
    cancel_release_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRequeued:
    """An attempt was closed and another follows: count it, log it."""

    key: RequestKey
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """An input was dropped, or a request not admitted: count it."""

    kind: RefusedKind | ErrorCode


@dataclass(frozen=True, slots=True, kw_only=True)
class Wasted:
    """Work that no answer is made of: count it."""

    waste: Waste


@dataclass(frozen=True, slots=True, kw_only=True)
class Noted:
    """Something a person who runs the system should see in the log."""

    what: str
    worker_id: WorkerId | None = None
    request_id: RequestId | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resign:
    """Someone has seen a higher epoch: this scheduler is not the active one and must exit."""

    epoch_seen: Epoch
    reason: str


CoreEffect: TypeAlias = (
    Tell
    | CloseStream
    | SendCommand
    | WelcomeWorker
    | AckEvents
    | CloseSession
    | PersistRecord
    | RewriteRecords
    | RequestEnded
    | RequestReleased
    | RequestRequeued
    | Refused
    | Wasted
    | Noted
    | Resign
)
