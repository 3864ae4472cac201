"""A worker as the scheduler sees it: who it is, its state machine, its capacity, and the arithmetic of losing it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from shared.domain.ids import Incarnation, TransferId, WorkerId
from shared.domain.request import Role, SequenceState

# An answer that comes back costs its prompt and a replay: worth it only if it then gets on by some tokens. Two blocks
# of the default size; who is older may have to wait for so many steps after the replay, and no longer.
CONTINUED_TOKENS = 32


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """One start of one worker process."""

    worker_id: WorkerId
    incarnation: Incarnation

    def __str__(self) -> str:
        return f"{self.worker_id}@{self.incarnation:x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvTarget:
    """Where prefill sends the KV of one attempt."""

    worker_id: WorkerId
    address: str
    incarnation: Incarnation
    transfer_id: TransferId
    transports: tuple[str, ...]
    """Offered by decode, best first."""
    tokens_held: int = 0
    """Prompt tokens whose KV decode already has."""


def num_tokens_at_start(num_prompt_tokens: int, num_delivered: int) -> int:
    """What a sequence begins with at decode; one that is continued with room for its next tokens, too."""
    return num_prompt_tokens + num_delivered + (CONTINUED_TOKENS if num_delivered else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """What a worker says of itself in its hello; constant for one incarnation, but for `is_draining`."""

    role: Role
    ref: WorkerRef
    address: str
    admin_url: str
    pid: int
    layout: bytes
    """The KV layout with its numerics, in one canonical encoding: equal bytes = the pair understands each other."""
    block_size: int
    num_blocks: int
    max_sequences: int
    token_budget: int
    """Prompt tokens a step; prefill only."""
    is_draining: bool = False

    def __post_init__(self) -> None:
        if self.role not in (Role.PREFILL, Role.DECODE):
            raise ValueError(f"a worker cannot be a {self.role}")
        if not self.ref.worker_id:
            raise ValueError("worker_id must not be empty")
        if self.block_size < 1 or self.num_blocks < 1:
            raise ValueError("a worker has at least one block of at least one token")
        if self.role is Role.PREFILL and self.token_budget < 1:
            raise ValueError("a prefill worker has a token budget of at least 1")

    def num_blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def num_blocks_at_start(self, tokens: int, max_total_tokens: int) -> int:
        """What decode reserves for a sequence that begins with `tokens`: one block more, to go on into."""
        return min(self.num_blocks_for(tokens) + 1, self.num_blocks_for(max_total_tokens))


def _no_counts() -> dict[str, int]:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """A heartbeat. True as of `commands_seen`: what was commanded later is not in these numbers."""

    commands_seen: int = 0
    blocks: Mapping[str, int] = field(default_factory=_no_counts)
    sequences: Mapping[str, int] = field(default_factory=_no_counts)
    queued_prompt_tokens: int = 0
    last_step_age_s: float = 0.0
    is_busy: bool = False
    is_draining: bool = False

    @property
    def num_under_way(self) -> int:
        """Sequences that have not ended."""
        return sum(count for state, count in self.sequences.items() if state != SequenceState.DONE)

    @property
    def available_blocks(self) -> int:
        """What a reservation can get: cached blocks give way to it."""
        return self.blocks.get("free", 0) + self.blocks.get("cached", 0)


class WorkerState(StrEnum):
    """STARTING: said hello, owes an inventory or releases of an earlier life. LOST: given up until its next hello."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"
    LOST = "lost"


class WorkerChange(Enum):
    """What happens to a worker."""

    SAID_HELLO = "said hello"
    SETTLED = "inventory told and nothing owed"
    STARTED_DRAINING = "started draining"
    LEFT = "closed its session while draining"
    LOST = "lost"


_NEXT: dict[tuple[WorkerState, WorkerChange], WorkerState] = {
    (WorkerState.STARTING, WorkerChange.SETTLED): WorkerState.READY,
    (WorkerState.STARTING, WorkerChange.STARTED_DRAINING): WorkerState.DRAINING,
    (WorkerState.READY, WorkerChange.STARTED_DRAINING): WorkerState.DRAINING,
    (WorkerState.DRAINING, WorkerChange.LEFT): WorkerState.STOPPED,
    (WorkerState.STARTING, WorkerChange.LOST): WorkerState.LOST,
    (WorkerState.READY, WorkerChange.LOST): WorkerState.LOST,
    (WorkerState.DRAINING, WorkerChange.LOST): WorkerState.LOST,
    **{(state, WorkerChange.SAID_HELLO): WorkerState.STARTING for state in WorkerState},
}


def advance_worker(state: WorkerState, change: WorkerChange) -> WorkerState:
    """The state after a change; a change that means nothing in a state leaves it as it is. Total, never raises."""
    return _NEXT.get((state, change), state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a worker did for one attempt, in tokens: of the prompt in prefill, of the answer in decode."""

    computed_tokens: int = 0
    """But for the next."""
    replayed_tokens: int = 0
    """Output tokens of earlier attempts that were fed again."""
    undelivered_tokens: int = 0
    """Of the computed ones, output tokens that went to no gateway, or lie beyond the end of the answer."""


NO_WORK = Work()


@dataclass(frozen=True, slots=True, kw_only=True)
class LossLimits:
    """After how long a worker is given up."""

    silence_s: float = 5.0
    step_stall_s: float = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSigns:
    """The last signs of life of a worker, in the scheduler's monotonic seconds."""

    heard_at: float
    session_broken_at: float | None = None
    last_step_age_s: float = 0.0
    is_busy: bool = False


def lost_reason(signs: WorkerSigns, now: float, limits: LossLimits) -> str | None:
    """Why the worker counts as lost, or None while it does not."""
    if signs.session_broken_at is not None and now - signs.session_broken_at >= limits.silence_s:
        return "session broken"
    if now - signs.heard_at >= limits.silence_s:
        return "no heartbeat"
    if signs.is_busy and signs.last_step_age_s + (now - signs.heard_at) >= limits.step_stall_s:
        return "engine step stalled"
    return None
