"""What was asked, and how it ended."""

from dataclasses import dataclass
from enum import StrEnum

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId, TokenId, WorkerId
from shared.domain.sampling import SamplingParams


class Role(StrEnum):
    """A kind of process."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    PREFILL = "prefill"
    DECODE = "decode"
    REDIS = "redis"


class RequestState(StrEnum):
    """Where a request is in its life; `shared.domain.lifecycle` holds the transitions."""

    QUEUED = "queued"
    PLACING = "placing"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DECODING = "decoding"
    ABORTING = "aborting"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        return self in TERMINAL_STATES


TERMINAL_STATES = frozenset({RequestState.FINISHED, RequestState.CANCELLED, RequestState.FAILED})


class SequenceState(StrEnum):
    """Where the sequence of one attempt is inside a worker."""

    WAITING_KV = "waiting_kv"
    RUNNING = "running"
    PARKED = "parked"
    PREEMPTED = "preempted"
    DONE = "done"


class FinishReason(StrEnum):
    """Why a finished sequence ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class CancelReason(StrEnum):
    """Who asked for the end of a request."""

    DISCONNECT = "disconnect"
    DELETE = "delete"
    DEADLINE = "deadline"
    """Its end is a failure, not a cancellation: who asks first makes no difference to the outcome."""
    GATEWAY_LOST = "gateway_lost"
    SLOW_CLIENT = "slow_client"
    SHUTDOWN = "shutdown"
    SIBLING = "sibling"
    """Another answer to the same question failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """A request after validation: token ids and limits, no text. What workers and scheduler know of it."""

    request_id: RequestId
    prompt_ids: tuple[TokenId, ...]
    max_tokens: int
    sampling: SamplingParams
    ignore_eos: bool = False
    has_stop_strings: bool = False
    kv_salt: int = 0

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError("prompt_ids must not be empty")
        if self.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def max_total_tokens(self) -> int:
        return len(self.prompt_ids) + self.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one answer. `completion_tokens` = highest delivered index."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The one end of a request. `state` is terminal; `error` is set exactly when it is not FINISHED."""

    state: RequestState
    finish_reason: FinishReason | None = None
    error: ServingError | None = None
    blocks_freed: int = 0

    def __post_init__(self) -> None:
        if self.state not in TERMINAL_STATES:
            raise ValueError(f"{self.state} is not an end")
        if (self.state is RequestState.FINISHED) == (self.error is not None):
            raise ValueError("an outcome has an error exactly when it is not finished")

    @staticmethod
    def broken_off(error: ServingError) -> "Outcome":
        """Cancelled where the client left or did not read, else failed."""
        is_cancel = error.code in (ErrorCode.CANCELLED, ErrorCode.SLOW_CLIENT)
        return Outcome(state=RequestState.CANCELLED if is_cancel else RequestState.FAILED, error=error)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRequest:
    """The part of a record that Redis holds. No prompt, no token, no text."""

    request_id: RequestId
    state: RequestState
    attempt: Attempt
    epoch: Epoch
    gateway_incarnation: Incarnation
    admitted_unix_ms: int
    seed: int
    prefill_worker: WorkerId | None = None
    decode_worker: WorkerId | None = None
    finish_reason: FinishReason | None = None
    error_code: str | None = None
    completion_tokens: int = 0
    session: int = 0
    """Above 0 where the answer can be resumed: its gateway is waited for longer."""
    key_hash: str = ""
    """Of the client's key: nobody else may cancel it by its id."""
