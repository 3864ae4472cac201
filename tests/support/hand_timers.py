"""Long timers of the event loop that ring when the test says so: what is to come after a time comes when all is ready for it."""

import asyncio
from asyncio.events import TimerHandle
from collections.abc import Callable
from contextvars import Context
from dataclasses import dataclass

import pytest

WAIT_S = 60.0  # a hang alone takes longer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Armed:
    handle: TimerHandle
    delay_s: float
    callback: Callable[..., object]
    arguments: tuple[object, ...]


class HandTimers:
    """Those that the running loop arms from now on, for `from_s` or longer: sleeps, timeouts, calls.

    Such a time is far beyond the test's own: by itself none of them rings.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, from_s: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._from_s = from_s
        self._really_call_at = self._loop.call_at
        self._armed: list[_Armed] = []
        monkeypatch.setattr(self._loop, "call_at", self._call_at)

    def _call_at(
        self, when: float, callback: Callable[..., object], *arguments: object, context: Context | None = None
    ) -> TimerHandle:
        handle = self._really_call_at(when, callback, *arguments, context=context)
        delay_s = when - self._loop.time()
        if delay_s > 0.9 * self._from_s:  # some of the time may be over when a timer for the rest is armed
            self._armed.append(_Armed(handle=handle, delay_s=delay_s, callback=callback, arguments=arguments))
        return handle

    async def until_armed(self, delay_s: float) -> None:
        """Waits for a timer with about so much time to go."""
        async with asyncio.timeout(WAIT_S):
            while not self._found(delay_s):
                await asyncio.sleep(0.001)

    def ring(self, delay_s: float) -> None:
        """Those with about so much time to go. Raises AssertionError where there are none."""
        found = self._found(delay_s)
        assert found, f"no timer of {delay_s} s among {self._armed}"
        for each in found:
            each.handle.cancel()
            self._loop.call_soon(each.callback, *each.arguments)

    def _found(self, delay_s: float) -> list[_Armed]:
        return [each for each in self._armed if not each.handle.cancelled() and 0.9 * delay_s < each.delay_s <= delay_s]
