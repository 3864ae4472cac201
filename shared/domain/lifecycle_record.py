"""What is known of one request while it lives: the record that the life-cycle table moves."""

from dataclasses import dataclass

from shared.domain.ids import Attempt, Incarnation, RequestId, TokenId
from shared.domain.lifecycle_events import Hold
from shared.domain.request import TERMINAL_STATES, Outcome, RequestSpec, RequestState
from shared.domain.worker import KvTarget, WorkerRef


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """What the scheduler knows of a request. Replaced as a whole by `advance`, never changed in place."""

    spec: RequestSpec
    state: RequestState
    attempt: Attempt
    """Grows on each entry to QUEUED, so that a refused or lost attempt is fenced."""
    gateway_incarnation: Incarnation
    admitted_at: float
    admitted_unix_ms: int
    entered_at: float
    is_adopted: bool = False
    """The present attempt is an earlier scheduler's: of it its workers and its gateway know more than is known here."""
    num_retries: int = 0
    distrusts_cache: bool = False
    """The KV of an attempt was wrong: the next computes all of the prompt anew."""
    num_workers_lost: int = 0
    """Worker starts that were given up while they held an attempt of it."""
    delivered_ids: tuple[TokenId, ...] = ()
    """Output tokens that the gateway holds: the next attempt goes on behind them. Never leaves this process's memory
    but for a worker."""
    awaits_delivered: Attempt | None = None
    """The closed attempt about which the gateway has not said yet what it holds: nothing is placed before."""
    requeue_reason: str = ""
    """Why that attempt was closed."""
    prefill: WorkerRef | None = None
    decode: WorkerRef | None = None
    target: KvTarget | None = None
    attach_ticket: bytes = b""
    holds: tuple[Hold, ...] = ()
    """Workers commanded for the current attempt and not yet asked to release it."""
    unreleased: tuple[Hold, ...] = ()
    """Workers asked to release an attempt that have not answered. Empty means that nothing is held anywhere."""
    outcome: Outcome | None = None
    """Fixed on entry to ABORTING or to an end; its `blocks_freed` follows the acknowledgements."""
    completion_tokens: int = 0
    cancel_asked_at: float | None = None

    @property
    def request_id(self) -> RequestId:
        return self.spec.request_id

    @property
    def is_settled(self) -> bool:
        """Ended, and every worker has let go."""
        return self.state in TERMINAL_STATES and not self.unreleased
