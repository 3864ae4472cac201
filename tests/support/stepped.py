"""The scripted generator step by step: each begins, and waits for the test's word before it ends."""

import threading
from collections.abc import Callable, Sequence

from shared.engine.build import Engine
from shared.engine.executor import DecodeRow, PrefillChunk, SampledToken, SequenceFault
from shared.engine.kv_digest import digest_layout
from shared.engine.scripted import ScriptedExecutor
from shared.kv.memory import KvMemory
from shared.process import RealClock
from tests.support.polling import eventually

WAIT_S = 60.0  # a hang alone takes longer


class SteppedExecutor(ScriptedExecutor):
    """Of one worker, whose end lets all steps go."""

    def __init__(self, num_blocks: int) -> None:
        memory = KvMemory(digest_layout(16), num_blocks)
        super().__init__(memory, chunk_tokens=64, clock=RealClock())
        self.engine = Engine(executor=self, memory=memory)
        self.begun: list[list[str]] = []
        """Whose chunks or rows, step by step."""
        self._permits = threading.Semaphore(0)
        self._runs_on = threading.Event()

    def permit(self, num_steps: int) -> None:
        """So many more steps may end."""
        self._permits.release(num_steps)

    def run_on(self) -> None:
        """From now on none waits."""
        self._runs_on.set()
        self._permits.release()  # for the one that waits

    async def has_begun(self, num_steps: int) -> None:
        """Waits for the beginning of the step of this number."""

        async def begun() -> int:
            return len(self.begun)

        await eventually(begun, lambda num: num >= num_steps, within_s=WAIT_S, what=f"step {num_steps} has begun")

    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: Callable[[int], None] | None = None
    ) -> list[SampledToken | SequenceFault | None]:
        self._begin([chunk.key.request_id for chunk in chunks])
        return super().prefill(chunks, on_layers)

    def decode(self, rows: Sequence[DecodeRow]) -> list[SampledToken | SequenceFault | None]:
        self._begin([row.key.request_id for row in rows])
        return super().decode(rows)

    def interrupt(self) -> None:
        self.run_on()
        super().interrupt()

    def _begin(self, names: list[str]) -> None:
        self.begun.append(names)
        if not self._runs_on.is_set():
            assert self._permits.acquire(timeout=WAIT_S)
