"""How a session ends. The first error counts, and the first reason to cancel; nothing breaks a complete answer off."""

import asyncio

from shared.domain.errors import ServingError
from shared.domain.request import CancelReason, Outcome, RequestState


class Ending:
    """What a session's tasks tell each other about the end. An event is set once and stays so."""

    def __init__(self) -> None:
        self.is_answered = False
        """The answer has its end: from then on it only waits for room."""
        self.error: ServingError | None = None
        """Why it has none."""
        self.broken_off = asyncio.Event()
        """Nothing more is to be read for the answer."""
        self.cancel_reason: CancelReason | None = None
        self.cancel_asked = asyncio.Event()
        self.left = asyncio.Event()
        """The request goes on without this session."""
        self.outcome: Outcome | None = None
        """As the scheduler told it."""
        self.has_outcome = asyncio.Event()

    def break_off(self, error: ServingError) -> None:
        """The answer ends with an error, unless it has an end."""
        if self.error is None and not self.is_answered:
            self.error = error
            self.broken_off.set()

    def ask_cancel(self, reason: CancelReason) -> bool:
        """False where it was asked before."""
        if self.cancel_reason is not None:
            return False
        self.cancel_reason = reason
        self.cancel_asked.set()
        return True

    def learn(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.has_outcome.set()

    @property
    def state(self) -> RequestState:
        """For the log line."""
        # The scheduler says finished only when the client has taken every token: then a cancel came too late.
        if self.outcome is not None and (not self.is_answered or self.outcome.state is RequestState.FINISHED):
            return self.outcome.state
        is_cancelled = self.cancel_reason not in (None, CancelReason.DEADLINE)
        if is_cancelled or (self.left.is_set() and not self.is_answered):
            return RequestState.CANCELLED
        return RequestState.FINISHED if self.is_answered else RequestState.FAILED
