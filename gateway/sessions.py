"""All live sessions of this gateway: the bound on their number, and the drain."""

import asyncio
from collections.abc import Callable
from typing import TypeAlias

from gateway.group import SessionGroup
from gateway.replay import Replay
from gateway.session import Session
from shared.aio.scope import spawn
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestId
from shared.domain.lifecycle import deadline_exceeded
from shared.domain.request import CancelReason

# What a cancelled session may still take: the outcome's wait, and a client that reads its last bytes.
_LAST_WORDS_S = 6.0

AnySession: TypeAlias = Session | SessionGroup | Replay


class Sessions:
    """Sessions run in `group`, which outlives every client connection."""

    def __init__(self, group: asyncio.TaskGroup, max_open_requests: int) -> None:
        self._group = group
        self._max_open = max_open_requests
        self._num_open = 0
        self._sessions: dict[AnySession, asyncio.Task[None]] = {}
        self.draining = asyncio.Event()
        """Set when the drain begins: nothing new is taken."""
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_open(self) -> int:
        """Requests between their first check and their end."""
        return self._num_open

    @property
    def num_streams(self) -> int:
        """Event streams among them."""
        return sum(session.is_stream for session in self._sessions)

    @property
    def is_draining(self) -> bool:
        return self.draining.is_set()

    def enter(self, num_places: int = 1) -> Callable[[], None]:
        """Takes places, all or none, one before the body is read; the function gives them back, once.

        Raises DRAINING or OVERLOADED.
        """
        if self.is_draining:
            raise ServingError(ErrorCode.DRAINING, "this gateway is shutting down")
        if self._num_open + num_places > self._max_open:
            raise ServingError(ErrorCode.OVERLOADED, "this gateway has too many open requests")
        self._num_open += num_places
        self._is_idle.clear()
        has_left = False

        def leave() -> None:
            nonlocal has_left
            if not has_left:
                has_left = True
                self._num_open -= num_places
                if self._num_open == 0:
                    self._is_idle.set()

        return leave

    def of_request(self, request_id: RequestId) -> list[Session]:
        """The readers of one answer: one, and older ones that are about to end."""
        return [each for each in self._sessions if isinstance(each, Session) and each.request_id == request_id]

    def start(
        self, session: AnySession, leave: Callable[[], None], *, name: str, timeout_s: float | None = None
    ) -> None:
        """Runs it, at most for `timeout_s`; it owns its places from here on."""
        self._sessions[session] = spawn(self._group, self._run(session, leave, timeout_s), name=f"session {name}")

    async def wait_idle(self) -> None:
        """Until no request is open."""
        await self._is_idle.wait()

    async def drain(self, timeout_s: float) -> None:
        """Refuses what is new or still in its body, lets what runs end, cancels what is left after `timeout_s`."""
        self.draining.set()
        try:
            async with asyncio.timeout(timeout_s):
                await self.wait_idle()
                return
        except TimeoutError:
            pass
        for session in list(self._sessions):
            session.cancel(CancelReason.SHUTDOWN, ServingError(ErrorCode.DRAINING, "this gateway is shutting down"))
        try:
            async with asyncio.timeout(_LAST_WORDS_S):
                await self.wait_idle()
        except TimeoutError:
            pass  # a client that does not read: its connection is cut with the server

    def close(self) -> None:
        """Ends whatever is left, without a word to its client."""
        for task in self._sessions.values():
            task.cancel()

    async def _run(self, session: AnySession, leave: Callable[[], None], timeout_s: float | None) -> None:
        timer = None
        if timeout_s is not None:
            # The scheduler has a clock of its own; a client is not to wait for one that is away.
            timer = asyncio.get_running_loop().call_later(
                max(timeout_s, 0.0), session.cancel, CancelReason.DEADLINE, deadline_exceeded()
            )
        try:
            await session.run()
        finally:
            if timer is not None:
                timer.cancel()
            del self._sessions[session]
            leave()
