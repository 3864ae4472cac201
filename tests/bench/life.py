"""What faults cost those who read: `python tests/bench/life.py [--model]`.

Starts a system of its own and prints three tables. The gaps between the tokens of five readers, alone and beside twenty
that stand still. The pause of a stream whose worker is killed, and of one whose worker stands still. The longest gap
while the scheduler is killed and restarted, which should be none. With the scripted generator a step takes 20 ms; with
`--model` as long as it takes.
"""

import argparse
import asyncio
import os
import signal
import statistics
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from typing import Any

from tests.support.cancelling import live_body
from tests.support.chat import CHAT_PATH, ChatRecord, collect, stream_chat
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.http_client import HttpStream, open_request
from tests.support.polling import eventually
from tests.support.script import Script, counting

NUM_READERS = 5
NUM_STALLED = 20
STEP_MS = 20
NUM_TOKENS = 300
NUM_FAULTS = 5
BACK_WITHIN_S = 60.0


def question(*, is_model: bool, num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    """A long answer."""
    if not is_model:
        return counting(num_tokens, step_ms=STEP_MS).body()
    messages = [{"role": "user", "content": "Tell me a long story about a river."}]
    return {"model": "default", "messages": messages, "max_tokens": num_tokens, "ignore_eos": True, "temperature": 0}


def gaps_ms(record: ChatRecord) -> list[float]:
    """Between the pieces of one answer."""
    return [(after - before) * 1e3 for before, after in pairwise(record.delta_times)]


def told(gaps: Sequence[float]) -> str:
    """The distribution of some gaps."""
    ordered = sorted(gaps)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    return f"n={len(ordered)} p50={statistics.median(ordered):.1f}ms p99={p99:.1f}ms max={ordered[-1]:.1f}ms"


async def read_all(cluster: Cluster, *, is_model: bool) -> list[float]:
    """The gaps of all readers together."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream_chat(cluster.port, question(is_model=is_model))) for _ in range(NUM_READERS)]
    return [gap for task in tasks for gap in gaps_ms(task.result())]


@asynccontextmanager
async def standing_still(cluster: Cluster) -> AsyncGenerator[None]:
    """Readers that have stopped, each with a full outbox."""
    body = {**Script(pieces=["x" * 4096], repeat=5_000).body(), "stream": True}
    async with AsyncExitStack() as stack:
        streams: list[HttpStream] = [
            await stack.enter_async_context(
                open_request(cluster.port, "POST", CHAT_PATH, body=body, receive_buffer=2_048)
            )
            for _ in range(NUM_STALLED)
        ]
        await eventually(
            cluster.status, lambda s: s.sequences.get("parked") == NUM_STALLED, within_s=120.0, what="all are parked"
        )
        yield
        for stream in streams:
            stream.cut()


async def report_parking(cluster: Cluster, *, is_model: bool) -> None:
    """Alone, and beside those that stand still."""
    print(f"gaps of {NUM_READERS} readers, alone:            {told(await read_all(cluster, is_model=is_model))}")
    if is_model:
        return  # its answers are short text: they fit into the sockets, and nobody is parked
    async with standing_still(cluster):
        gaps = await read_all(cluster, is_model=is_model)
    print(f"gaps of {NUM_READERS} readers, {NUM_STALLED} standing still: {told(gaps)}")


async def pause_ms(cluster: Cluster, role: str, kind: signal.Signals, *, is_model: bool) -> float:
    """The longest gap of a stream whose system loses a process in mid-answer."""
    await cluster.wait_ready(within_s=BACK_WITHIN_S)
    async with live_body(cluster, question(is_model=is_model)) as stream:
        record = await collect(stream, until_deltas=20)
        victim = (await cluster.status()).of_role(role)[0]
        if role == "decode":
            workers = (await cluster.status()).of_role(role)
            used = [(await cluster.metrics(worker)).total("firsttoken_kv_blocks", state="active") for worker in workers]
            victim = workers[used.index(max(used))]
        os.kill(victim.live_pid, kind)
        try:
            await collect(stream, record=record)
        finally:
            if kind is signal.SIGSTOP:
                os.kill(victim.live_pid, signal.SIGCONT)
    assert record.error is None, record.error
    return max(gaps_ms(record)[18:])


async def report_faults(cluster: Cluster, *, is_model: bool) -> None:
    """A line a kind of fault."""
    for role, kind in (
        ("decode", signal.SIGKILL),
        ("decode", signal.SIGSTOP),
        ("prefill", signal.SIGKILL),
        ("scheduler", signal.SIGKILL),
    ):
        pauses = [await pause_ms(cluster, role, kind, is_model=is_model) for _ in range(NUM_FAULTS)]
        print(f"longest gap, {role} {kind.name}: {told(pauses)}")


async def run(cluster: Cluster, *, is_model: bool) -> None:
    """All of it."""
    await stream_chat(cluster.port, question(is_model=is_model, num_tokens=10))
    await report_parking(cluster, is_model=is_model)
    await report_faults(cluster, is_model=is_model)
    await cluster.wait_ready(within_s=BACK_WITHIN_S)


def main() -> None:
    """Start a system, measure, stop it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="store_true", help="with the default model in the scripted generator's place")
    is_model: bool = parser.parse_args().model
    plan = ClusterPlan().decode(2).prefill(1 if is_model else 2)
    with (plan if is_model else plan.scripted()).start() as cluster:
        asyncio.run(run(cluster, is_model=is_model))


if __name__ == "__main__":
    main()
