"""CAN-02: what prefill still computes for a prompt whose client has gone, in chunks and not in seconds."""

import asyncio
import threading
from collections.abc import Callable, Sequence

from shared.engine.build import Engine
from shared.engine.executor import PrefillChunk, SampledToken, SequenceFault
from shared.engine.kv_digest import digest_layout
from shared.engine.scripted import ScriptedExecutor
from shared.kv.memory import KvMemory
from shared.process import RealClock
from shared.wire import scheduler_pb2
from tests.support.worker_pair import expected_ids, key_of, scripted_spec, worker_pair

NUM_BLOCKS = 1024
WAIT_S = 60.0


class SteppedExecutor(ScriptedExecutor):
    """Begins a step and waits in it for a permit."""

    def __init__(self, memory: KvMemory) -> None:
        super().__init__(memory, chunk_tokens=64, clock=RealClock())
        self.permits = threading.Semaphore(0)
        self.begun: list[str] = []
        """Whose chunks, in order."""

    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: Callable[[int], None] | None = None
    ) -> list[SampledToken | SequenceFault | None]:
        self.begun += [chunk.key.request_id for chunk in chunks]
        assert self.permits.acquire(timeout=WAIT_S)
        return super().prefill(chunks, on_layers)


async def test_the_next_prompt_waits_for_the_chunk_under_way_and_no_other() -> None:
    """Cancelled in the fourth of twenty-one chunks: there is no fifth; the short prompt's chunk is next, and decode is sent
    nothing more.
    """
    memory = KvMemory(digest_layout(16), NUM_BLOCKS)
    executor = SteppedExecutor(memory)
    dead, short = scripted_spec("dead", num_prompt_tokens=1_300), scripted_spec("short", max_tokens=10)
    async with worker_pair(prefill_engine=Engine(executor=executor, memory=memory)) as pair:
        try:
            await pair.place(dead)
            executor.permits.release(3)
            async with asyncio.timeout(WAIT_S):
                while len(executor.begun) < 4:
                    await asyncio.sleep(0.002)
            for worker in ("prefill-0", "decode-0"):
                await pair.scheduler.send(worker, key_of("dead"), abort=scheduler_pb2.Abort())
            reserved = await pair.place(short)
            await pair.scheduler.until(
                lambda: any(up.heartbeat.commands_seen == 3 for up in pair.scheduler.ups["prefill-0"])
            )
        finally:
            executor.permits.release(100)
        gateway = await pair.gateway()
        await gateway.attach(key_of("short"), reserved.attach_ticket)
        await gateway.ended(key_of("short"))
        released = await pair.scheduler.event("prefill-0", key_of("dead"), "released")
        told = [event.WhichOneof("event") for event in pair.scheduler.events("decode-0", key_of("dead"))]

        assert [*["dead"] * 4, "short"] == executor.begun
        assert 4 * 64 == released.released.computed_tokens
        assert ["reserved", "released"] == told
        assert expected_ids(short) == gateway.ids["short"]
