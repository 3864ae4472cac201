"""What can happen to a request and what is then to be done: the vocabulary of `shared.domain.lifecycle`.

No transitions here.
"""

from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from shared.domain.errors import ServingError
from shared.domain.ids import Attempt, Incarnation, TokenId, WorkerId
from shared.domain.request import CancelReason, FinishReason, Outcome, RequestSpec, Role
from shared.domain.worker import KvTarget, WorkerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """A worker start that was sent a command for one attempt and has not said yet that it let go of it."""

    worker: WorkerRef
    role: Role
    attempt: Attempt
    is_lost: bool = False
    """The scheduler gave this worker up; the hold is a debt of that incarnation and keeps nobody waiting."""

    @property
    def key(self) -> tuple[WorkerId, Incarnation, Attempt]:
        return self.worker.worker_id, self.worker.incarnation, self.attempt


# ---- events. Those of FENCED belong to one attempt; the others to the request or to a worker.


@dataclass(frozen=True, slots=True, kw_only=True)
class Admitted:
    """The queue has room and some pair of pools can hold the request."""

    spec: RequestSpec
    gateway_incarnation: Incarnation
    unix_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """An earlier scheduler admitted the request; `was_placed` past QUEUED. Its spec comes with `GatewayBack`."""

    spec: RequestSpec
    gateway_incarnation: Incarnation
    unix_ms: int
    attempt: Attempt
    was_placed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayBack:
    """The gateway of an adopted request dialled the new scheduler; 0 = it was never told of an attempt."""

    spec: RequestSpec
    gateway_incarnation: Incarnation
    last_attempt_seen: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Inherited:
    """A worker's inventory names an attempt of an adopted request, which may be a later one than the record's.

    `is_held` False: it has ended there. `is_running` and what follows it are decode's.
    """

    attempt: Attempt
    worker: WorkerRef
    role: Role
    is_held: bool
    is_running: bool = False
    target: KvTarget | None = None
    attach_ticket: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementChosen:
    """The pair of workers for this attempt."""

    attempt: Attempt
    prefill: WorkerRef
    decode: WorkerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementWritten:
    """The placed record is in Redis, or its write is owed: Reserve may be sent."""

    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Decode holds blocks and an outbox for the whole job; `target` is for prefill."""

    attempt: Attempt
    target: KvTarget
    attach_ticket: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class ReserveRefused:
    """Decode had too few blocks and took nothing."""

    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillDone:
    """The last chunk of the prompt is computed."""

    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCommitted:
    """Every block of the prompt and token 1 are at decode, checked."""

    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceDone:
    """Decode's word that the sequence ended and its outbox is empty."""

    attempt: Attempt
    finish_reason: FinishReason
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What the gateway holds of the answer, acknowledged or not: the next attempt goes on behind it."""

    closed_attempt: Attempt
    ids: tuple[TokenId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerComplete:
    """The gateway holds the whole answer; the worker that made it is gone."""

    closed_attempt: Attempt
    finish_reason: FinishReason
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preempted:
    """Decode took the blocks of a running sequence back."""

    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFailed:
    """A worker, or the loss of one, ended this attempt."""

    attempt: Attempt
    role: Role
    error: ServingError
    has_lost_holder: bool = False
    """A worker start was given up while it held the attempt, and that is why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    """Someone asked for the end."""

    reason: CancelReason


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlinePassed:
    """The time that the client gave is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityLost:
    """No worker that could serve the request has been ready for the time after which a worker is lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """A worker's answer to Abort or Release; `released_attempt` names the hold, which may be an older attempt's."""

    worker: WorkerRef
    released_attempt: Attempt
    blocks_freed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLost:
    """The scheduler gave a worker up: its holds keep nobody waiting any more, yet stay on record."""

    worker: WorkerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerGone:
    """A worker start is proven to have ended, and all that it held with it."""

    worker: WorkerRef


Event: TypeAlias = (
    Admitted
    | Adopted
    | GatewayBack
    | Inherited
    | PlacementChosen
    | PlacementWritten
    | Reserved
    | ReserveRefused
    | PrefillDone
    | KvCommitted
    | SequenceDone
    | Delivered
    | AnswerComplete
    | Preempted
    | AttemptFailed
    | CancelRequested
    | DeadlinePassed
    | CapacityLost
    | Released
    | WorkerLost
    | WorkerGone
)
FENCED = (
    PlacementChosen,
    PlacementWritten,
    Reserved,
    ReserveRefused,
    PrefillDone,
    KvCommitted,
    SequenceDone,
    Preempted,
    AttemptFailed,
)


# ---- effects: commands for whoever drives the table, in the order in which they are to be performed


class WriteStep(Enum):
    """The three writes of a request."""

    ADMITTED = "admitted"
    PLACED = "placed"
    OUTCOME = "outcome"


@dataclass(frozen=True, slots=True, kw_only=True)
class Persist:
    """Write the record.

    ADMITTED comes before Queued is told; PLACED is answered by PlacementWritten; OUTCOME holds up nothing.
    """

    step: WriteStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Send the whole job to decode."""

    worker: WorkerRef
    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class StartPrefill:
    """Send the prompt and the KV target to prefill."""

    worker: WorkerRef
    attempt: Attempt
    target: KvTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Make a worker stop and free; repeated until it answers Released or its incarnation is gone."""

    hold: Hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Make a worker free what is left of an attempt that is over; repeated like Abort."""

    hold: Hold


@dataclass(frozen=True, slots=True, kw_only=True)
class TellQueued:
    """Tell the gateway that the request waits, and where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TellRequeued:
    """Tell the gateway that the attempt is closed; it answers with Delivered or AnswerComplete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TellPlaced:
    """Tell the gateway where to attach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TellOutcome:
    """Tell the gateway how it ended."""

    outcome: Outcome


Effect: TypeAlias = (
    Persist | Reserve | StartPrefill | Abort | Release | TellQueued | TellRequeued | TellPlaced | TellOutcome
)


EVENT_TYPES: tuple[type[Event], ...] = (
    Admitted, Adopted, GatewayBack, Inherited, PlacementChosen, PlacementWritten, Reserved, ReserveRefused,
    PrefillDone, KvCommitted, SequenceDone,
    Delivered, AnswerComplete, Preempted, AttemptFailed, CancelRequested, DeadlinePassed, CapacityLost, Released,
    WorkerLost, WorkerGone,
)  # fmt: skip
