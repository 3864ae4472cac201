"""Tasks that cannot be lost: made in a group with a name, stopped by an event, awaited after a cancel."""

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


def spawn(group: asyncio.TaskGroup, coro: Coroutine[Any, Any, T], *, name: str) -> asyncio.Task[T]:
    """The only way a task comes into being. The name should hold the request id where there is one."""
    return group.create_task(coro, name=name)


async def cancel_and_wait(task: asyncio.Task[Any]) -> None:
    """Returns when the task has ended (it may have before); its own failure is its group's to report."""
    task.cancel()
    await asyncio.wait({task})


class stop_when:  # noqa: N801 - used like asyncio.timeout
    """`async with stop_when(event):` runs the body and cancels it when the event is set; that does not leak.

    A cancellation from elsewhere comes through. An event that is set already stops the body at its first await.
    After the body `was_stopped` tells which it was.
    """

    def __init__(self, event: asyncio.Event) -> None:
        self._event = event
        self._body: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | asyncio.Handle | None = None
        self._cancelling_before = 0
        self._has_cancelled = False
        self.was_stopped = False

    async def __aenter__(self) -> Self:
        body = asyncio.current_task()
        assert body is not None
        self._body = body
        self._cancelling_before = body.cancelling()
        if self._event.is_set():
            # Not at once: a running task that is cancelled keeps that until its next await, also behind this scope.
            self._watcher = asyncio.get_running_loop().call_soon(self._cancel_body)
        else:
            self._watcher = asyncio.create_task(self._watch(), name=f"stop_when {body.get_name()}")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._body is not None
        if self._watcher is not None:
            self._watcher.cancel()  # not awaited: it cannot do anything after this
        if not self._has_cancelled:
            return False
        is_ours_alone = self._body.uncancel() <= self._cancelling_before
        self.was_stopped = is_ours_alone and kind is not None and issubclass(kind, asyncio.CancelledError)
        return self.was_stopped

    async def _watch(self) -> None:
        await self._event.wait()
        self._cancel_body()

    def _cancel_body(self) -> None:
        assert self._body is not None
        self._has_cancelled = True
        self._body.cancel()
