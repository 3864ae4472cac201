"""A task group that fails in the moment in which it is cancelled, and so keeps the cancel to itself (until Python 3.13)."""

import asyncio

from shared.aio.scope import spawn


class BreakingGroup:
    """Stands for one use of a stream: its writer breaks at once, its reader ends only when `may_end` is set."""

    def __init__(self) -> None:
        self.is_breaking, self.may_end = asyncio.Event(), asyncio.Event()
        self.num_tries = 0

    async def run(self) -> None:
        """Raises InvalidStateError in a group, whether or not it was cancelled meanwhile."""
        self.num_tries += 1
        async with asyncio.TaskGroup() as group:
            spawn(group, self._end_late(), name="reader")
            spawn(group, self._break(), name="writer")

    async def _end_late(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.is_breaking.set()
            await self.may_end.wait()

    async def _break(self) -> None:
        raise asyncio.InvalidStateError
