"""What a hand-over exposes, and how fast KV moves: `python tests/bench/kv_transfer.py [--requests N] [--chunk-ms MS]`.

A real prefill worker here and a real decode worker in a process of its own, with the default model's cache and an
executor that computes nothing: a chunk takes the time that it is told, its layers are told in groups or not at all.
Exposed is what the worker counts itself: from the last prefill step of a prompt to the acknowledgement of its last frame
and of token 1. With chunks that take no time that is the whole transfer, which gives the rate. Beside each: the least as a
multiple of the time in which this machine copies those bytes once in memory, measured at the start.
"""

import argparse
import asyncio
import logging
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
import structlog
from grpc import aio

from decode_worker import worker as decode
from decode_worker.config import DecodeConfig
from prefill_worker import worker as prefill
from prefill_worker.config import PrefillConfig
from shared.aio.scope import spawn
from shared.domain.ids import RequestId, RequestKey, TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.engine.build import Engine
from shared.engine.executor import DecodeRow, PrefillChunk, SampledToken, SequenceFault
from shared.kv.block_table import BlockTable
from shared.kv.layout import KvLayout
from shared.kv.memory import KvMemory
from shared.process import Process, RealClock
from shared.rpc.channels import ChannelPool
from shared.rpc.server import serve
from shared.wire import scheduler_pb2_grpc
from tests.support.worker_pair import TOKEN, FakeScheduler, WorkerPair, key_of

CHUNK_TOKENS = 64
NUM_BLOCKS = 512
DECODE_STEP_S = 0.02


class IdleExecutor:
    """Takes its time and writes nothing."""

    def __init__(self, dtype: str) -> None:
        self.layout = KvLayout(
            num_layers=30, num_kv_heads=3, head_dim=64, dtype=dtype, block_size=16, numerics=b"bench"
        )
        self.window = 8192
        self.eos_ids: frozenset[TokenId] = frozenset()
        self.chunk_s = 0.0
        self.num_groups = 1

    def chunk_ends(self, key: RequestKey, spec: RequestSpec) -> tuple[int, ...]:
        """As the model's."""
        return (*range(CHUNK_TOKENS, spec.num_prompt_tokens, CHUNK_TOKENS), spec.num_prompt_tokens)

    def prefill(
        self, chunks: Sequence[PrefillChunk], on_layers: Callable[[int], None] | None = None
    ) -> list[SampledToken | SequenceFault | None]:
        """Sleeps; a shorter chunk is shorter in time as well, but half of it is there in any case."""
        filled = max(chunk.end - chunk.start for chunk in chunks) / CHUNK_TOKENS
        for group in range(1, self.num_groups + 1):
            time.sleep(self.chunk_s * (1 + filled) / 2 / self.num_groups)
            if on_layers is not None and group < self.num_groups:
                on_layers(self.layout.num_layers * group // self.num_groups)
        return [SampledToken(token_id=TokenId(7)) if chunk.is_last else None for chunk in chunks]

    def check_commit(self, key: RequestKey, spec: RequestSpec, block_table: BlockTable) -> None:
        """Whatever came."""

    def decode(self, rows: Sequence[DecodeRow]) -> list[SampledToken | SequenceFault | None]:
        """Slow enough that no answer ends before its last frame is acknowledged."""
        time.sleep(DECODE_STEP_S)
        return [SampledToken(token_id=TokenId(7)) for _ in rows]

    def release(self, key: RequestKey) -> None:
        """Nothing is kept."""

    def interrupt(self) -> None:
        """A chunk is short."""


def engine_of(dtype: str) -> tuple[IdleExecutor, Engine]:
    """The executor and its cache."""
    executor = IdleExecutor(dtype)
    return executor, Engine(executor=executor, memory=KvMemory(executor.layout, NUM_BLOCKS))


def settings_of(scheduler: str, transports: str) -> dict[str, object]:
    """What both workers are told."""
    return {
        "scripted": True,
        "port": 0,
        "scheduler": scheduler,
        "cluster_token": TOKEN,
        "drain_timeout_s": 0.2,
        "transports": transports,
    }


async def run_decode(scheduler: str, transports: str, dtype: str) -> None:
    """The other process; until it is terminated."""
    process = Process("decode", "decode-0", RealClock())
    config = DecodeConfig.model_validate(settings_of(scheduler, transports))
    await decode.run_worker(process, config, engine_of(dtype)[1])


async def hand_over(pair: WorkerPair, number: int, num_tokens: int, exposed: list[float]) -> None:
    """One prompt that no other shares a block with, until decode has all of it; then it is released."""
    rng = random.Random(number)
    name = f"r{number}"
    spec = RequestSpec(
        request_id=RequestId(name),
        prompt_ids=tuple(TokenId(rng.randrange(1, 1 << 15)) for _ in range(num_tokens)),
        max_tokens=64,
        sampling=SamplingParams(seed=1),
    )
    await pair.place(spec)
    num_before = len(exposed)
    await pair.scheduler.event("decode-0", key_of(name), "kv_committed")
    while len(exposed) == num_before:
        await asyncio.sleep(0.001)
    await pair.release("prefill-0", key_of(name))
    await pair.release("decode-0", key_of(name), abort=True)


def copy_bytes_s(num_bytes: int) -> float:
    """How fast one thread copies so many bytes, the best of some tries."""
    source, target = np.ones((2, num_bytes), dtype=np.uint8)
    times: list[float] = []
    for _ in range(15):
        begun = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begun)
    return num_bytes / min(times)


async def measure(transports: str, arguments: argparse.Namespace, copying: float) -> None:
    """All cases over one pair of workers; a line each."""
    scheduler = FakeScheduler()  # pyright: ignore[reportAbstractUsage] - workers call Session alone
    channels = ChannelPool(TOKEN)

    def add(server: aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(scheduler, server)

    async with serve(add, host="127.0.0.1", port=0, token=TOKEN, services=()) as server, asyncio.TaskGroup() as group:
        pair = WorkerPair(scheduler, channels, group)
        executor, engine = engine_of(arguments.dtype)
        exposed: list[float] = []

        def record(value: float) -> None:
            exposed.append(value)

        pair.prefill.metrics.kv_transfer_exposed_seconds.record = record
        config = PrefillConfig.model_validate(settings_of(server.address, transports))
        prefilling = spawn(group, prefill.run_worker(pair.prefill, config, engine), name="prefill-0")
        child = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--decode", server.address, "--transports", transports, "--dtype", arguments.dtype,
            env={**os.environ}, stdout=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            await scheduler.until(lambda: len(scheduler.hellos) == 2)
            number = 0
            for title, chunk_ms, num_groups in (
                ("no compute", 0.0, 1),
                ("whole chunks", arguments.chunk_ms, 1),
                ("3 layer groups", arguments.chunk_ms, 3),
            ):
                executor.chunk_s, executor.num_groups = chunk_ms / 1e3, num_groups
                exposed.clear()
                for _ in range(arguments.requests):
                    number += 1
                    await hand_over(pair, number, arguments.tokens, exposed)
                num_bytes = engine.memory.layout.num_blocks_for(arguments.tokens) * engine.memory.layout.block_bytes
                rate = f"  {num_bytes / min(exposed) / 1e9:.2f} GB/s" if chunk_ms == 0 else ""
                ordered = sorted(exposed)
                print(
                    f"{transports:5} {title:15} n={len(ordered)} {num_bytes / 1e6:.1f} MB exposed ms: "
                    f"min={ordered[0] * 1e3:.2f} p50={statistics.median(ordered) * 1e3:.2f} "
                    f"p90={ordered[int(len(ordered) * 0.9)] * 1e3:.2f}  "
                    f"{ordered[0] * copying / num_bytes:.2f} x the time of one copy{rate}",
                    flush=True,
                )
        finally:
            child.terminate()
            await child.wait()
            pair.prefill.stopping.set()
            await asyncio.wait({prefilling}, timeout=10)
            await channels.close()


def main() -> None:
    """Measure by each transport, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=30, help="of each kind (default 30)")
    parser.add_argument("--tokens", type=int, default=839, help="of a prompt (default 839)")
    parser.add_argument("--chunk-ms", type=float, default=80.0, help="a chunk of 64 tokens takes (default 80)")
    parser.add_argument("--dtype", default="float32", help="of the cache (default float32)")
    parser.add_argument("--transports", default="grpc shm", help="which (default: grpc shm)")
    parser.add_argument("--decode", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.decode:
        asyncio.run(run_decode(arguments.decode, arguments.transports, arguments.dtype))
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    layout = IdleExecutor(arguments.dtype).layout
    copying = copy_bytes_s(layout.num_blocks_for(arguments.tokens) * layout.block_bytes)
    print(f"limit    one thread copies {copying / 1e9:.1f} GB/s")
    for transports in arguments.transports.split():
        asyncio.run(measure(transports, arguments, copying))


if __name__ == "__main__":
    main()
