"""What is remembered of one request for its canonical log line and the metrics. No text, ever."""

from gateway.request_id import Identity
from shared.domain.clock import Clock
from shared.domain.errors import ServingError
from shared.domain.ids import WorkerId
from shared.domain.request import CancelReason, RequestState, Usage
from shared.obs.logs import get_logger
from shared.obs.metrics import Metrics

_log = get_logger("request")


class Journal:
    """Begins when the request line has been read. `write` it once."""

    def __init__(self, clock: Clock, metrics: Metrics, identity: Identity, route: str) -> None:
        self._clock = clock
        self._metrics = metrics
        self._identity = identity
        self.route = route
        self.received_at = clock.monotonic()
        self._marks_ms: dict[str, float] = {}
        self._workers: dict[str, WorkerId] = {}
        self.num_prompt_tokens: int | None = None
        self.num_ignored_fields = 0
        self.usage: Usage | None = None
        self.cancel_reason: CancelReason | None = None

    def mark_queued(self) -> None:
        self._mark("queued_ms")

    def mark_placed(self, prefill_worker: WorkerId, decode_worker: WorkerId) -> None:
        self._mark("placed_ms")
        self._workers = {"prefill_worker": prefill_worker, "decode_worker": decode_worker}

    def mark_first_token(self) -> None:
        """The first token came; its text may still be held back."""
        self._mark("first_token_ms")

    def mark_first_text_sent(self, *, is_stream: bool) -> None:
        """TTFT: the first text was taken by the socket. A whole answer has none."""
        if self._mark("first_text_sent_ms") and is_stream:
            self._metrics.time_to_first_token.record(self._marks_ms["first_text_sent_ms"] / 1000)

    def write(self, outcome: RequestState, error: ServingError | None) -> None:
        """The canonical line."""
        usage = self.usage
        _log.info(
            "request",
            request_id=self._identity.request_id,
            client_request_id=self._identity.client_request_id,
            route=self.route,
            outcome=outcome.value,
            code=None if error is None else error.code.value,
            param=None if error is None else error.param,
            cancel_reason=None if self.cancel_reason is None else self.cancel_reason.value,
            **self._marks_ms,
            end_ms=self._elapsed_ms(),
            prompt_tokens=self.num_prompt_tokens,
            completion_tokens=None if usage is None else usage.completion_tokens,
            cached_tokens=None if usage is None else usage.cached_tokens,
            ignored_fields=self.num_ignored_fields,
            **self._workers,
        )

    def _mark(self, name: str) -> bool:
        """False where it was marked before."""
        if name in self._marks_ms:
            return False
        self._marks_ms[name] = self._elapsed_ms()
        return True

    def _elapsed_ms(self) -> float:
        return round((self._clock.monotonic() - self.received_at) * 1000, 3)
