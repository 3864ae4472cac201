"""SCH-02: readers that stand still cost a bounded amount, hold nobody up, and lose nothing if they read on in time."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support import leaks
from tests.support.cancelling import outcomes, wait_outcomes
from tests.support.chat import CHAT_PATH, ChatRecord, ask, collect, stream_chat
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.http_client import HttpStream, open_request
from tests.support.polling import eventually
from tests.support.process_logs import logged
from tests.support.script import Script, counting

NUM_STALLED = 20  # half of them read on
NUM_NORMAL = 5
NUM_LOOKS = 12
OUTBOX_TOKENS = 256
SOCKET_TOKENS = 200  # of 2 KiB: the gateway and both kernels hold half of that as a rule, of one stream
MAX_BYTES_EACH = 1024 * 1024  # as docs/reliability.md has it
KV_BLOCK_BYTES = 1024  # of the scripted generator
STALL_TIMEOUT_S = 15  # more than the 10 s after which one that is parked gives its blocks back
BIG = "0123456789abcdef" * 128  # 2 KiB: the sockets hold few tokens, and the prompt that says it stays short
OFFERED = Script(pieces=[BIG], repeat=100_000)
READ_ON = Script(pieces=[f"{i}:{BIG}" for i in range(3)], repeat=300)
SCRIPTS = [READ_ON if number % 2 else OFFERED for number in range(NUM_STALLED)]
COMPUTED = "firsttoken_tokens_computed_total"
WASTED = "firsttoken_wasted_tokens_total"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def parking_system() -> Generator[Cluster]:
    """A reader may stand still for some seconds."""
    with (
        ClusterPlan()
        .scripted()
        .setting("stall_timeout_s", STALL_TIMEOUT_S)
        .setting("worker_lost_s", 20)
        .start() as cluster
    ):
        yield cluster


@pytest.fixture
async def parking(parking_system: Cluster) -> AsyncGenerator[Cluster]:
    """Warm and idle before, idle and whole after."""
    async with asyncio.TaskGroup() as group:  # memory for as many prompts of this length stays with the processes
        for script in SCRIPTS:
            group.create_task(ask(parking_system.port, {**script.body(), "max_tokens": 1}))
    baseline = await leaks.capture(parking_system)
    yield parking_system
    await leaks.assert_no_leaks(parking_system, baseline)


async def memory_bytes(cluster: Cluster) -> dict[str, int]:
    """Resident in the gateway and the decode worker, by the operating system's word; of the KV pool what is not in use."""
    status = await cluster.status()
    held = {role: _resident_bytes(status.one(role).live_pid) for role in ("gateway", "decode")}
    held["decode"] -= status.blocks["decode"]["active"] * KV_BLOCK_BYTES
    return held


def _resident_bytes(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


async def computed(cluster: Cluster) -> float:
    """Output tokens."""
    (metrics,) = await cluster.role_metrics("decode")
    return metrics.total(COMPUTED)


async def wait_until_still(cluster: Cluster) -> None:
    """Nothing is computed over some looks: all have full outboxes, or have given their blocks back.

    Each look is a turn of gateway and decode worker; few, since those that read on must do so before the stall's end.
    """
    seen: list[float] = []

    async def look() -> list[float]:
        seen.append(await computed(cluster))
        return seen[-NUM_LOOKS:]

    await eventually(
        look, lambda last: len(last) == NUM_LOOKS and len(set(last)) == 1, within_s=60.0, what="all stand still"
    )


async def open_all(cluster: Cluster, stack: AsyncExitStack, scripts: list[Script]) -> list[HttpStream]:
    """At once: each stall clock runs from its own stream on."""

    async def begin(script: Script) -> HttpStream:
        body = {**script.body(), "stream": True}
        opening = open_request(cluster.port, "POST", CHAT_PATH, body=body, receive_buffer=8_192)
        return await stack.enter_async_context(opening)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(begin(script)) for script in scripts]
    return [task.result() for task in tasks]


def request_of(stream: HttpStream) -> str:
    """Its id."""
    return stream.headers["x-firsttoken-request"]


async def read_when_given_up(cluster: Cluster, stream: HttpStream) -> ChatRecord:
    """Reads on once the gateway has ended the request, and not before."""

    async def reasons() -> list[str]:
        return [line["cancel_reason"] for line in await logged(cluster, "gateway-0", "request", request_of(stream))]

    await eventually(reasons, lambda said: said == ["slow_client"], within_s=60.0 + STALL_TIMEOUT_S, what="given up")
    return await collect(stream)


async def test_twenty_stand_still_and_five_read(parking: Cluster) -> None:
    """The five are served; of the twenty those that read on get every token in order, the others end as slow clients."""
    before, tokens, memory = await outcomes(parking), await computed(parking), await memory_bytes(parking)
    async with AsyncExitStack() as stack:
        streams = await open_all(parking, stack, SCRIPTS)
        await wait_until_still(parking)
        assert await computed(parking) - tokens <= NUM_STALLED * (OUTBOX_TOKENS + SOCKET_TOKENS)
        grown = {role: held - memory[role] for role, held in (await memory_bytes(parking)).items()}
        assert all(num_bytes <= NUM_STALLED * MAX_BYTES_EACH for num_bytes in grown.values()), grown

        normal = [counting(200 + number, step_ms=5) for number in range(NUM_NORMAL)]
        async with asyncio.TaskGroup() as group:
            read = [group.create_task(stream_chat(parking.port, script.body())) for script in normal]
            reading_on = [group.create_task(collect(stream)) for stream in streams[1::2]]
        assert [script.text() for script in normal] == [task.result().text for task in read]
        for task in reading_on:
            assert (READ_ON.text(), "stop", None) == (
                task.result().text,
                task.result().finish_reason,
                task.result().error,
            )

        async with asyncio.TaskGroup() as group:
            late = [group.create_task(read_when_given_up(parking, stream)) for stream in streams[::2]]
    for stream, task in zip(streams[::2], late, strict=True):
        record = task.result()
        assert "slow_client" == (record.error or {})["code"]
        num_taken = len(record.text) // len(BIG)  # by its link, which is more than is acknowledged
        assert OFFERED.text(num_taken) == record.text
        (ended,) = await eventually(
            lambda stream=stream: logged(parking, "decode-0", "attempt ended", request_of(stream)),
            lambda lines: len(lines) > 0,
            within_s=40.0,
            what="decode has ended it",
        )
        assert 0 < ended["output_tokens"] - num_taken <= OUTBOX_TOKENS
    await wait_outcomes(parking, before, finished=NUM_NORMAL + len(reading_on), cancelled=len(late))
    (metrics,) = await parking.role_metrics("scheduler")
    # After ten seconds they had given their blocks back: their prompts were computed for a continuation that never came.
    assert metrics.total(WASTED, cause="requeued", stage="prefill") > 0
