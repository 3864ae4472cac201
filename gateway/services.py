"""What sessions are made from."""

from dataclasses import dataclass

from gateway.canceller import Canceller
from gateway.clients.scheduler import SchedulerClient
from gateway.clients.tokens import TokenStreams
from gateway.fleet import FleetView
from shared.domain.clock import Clock
from shared.obs.metrics import Metrics
from shared.state.stream_log import LoggedAnswer, StreamLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """What every session uses."""

    clock: Clock
    metrics: Metrics
    scheduler: SchedulerClient
    fleet: FleetView
    tokens: TokenStreams
    canceller: Canceller
    served_model_name: str
    logs: StreamLog | None = None
    """None = no Redis: nothing can be resumed."""
    resumable_grace_s: float = 30.0
    """How long a resumable answer without its client waits for the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """What a session goes on from; its client has the text of tokens 1..`from_index`."""

    logged: LoggedAnswer
    from_index: int
