"""Services are stopped one after the other: what runs ends, or goes on elsewhere; nothing new is lost on the way."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack

import pytest

from tests.support import leaks
from tests.support.cancelling import live, wait_for_state
from tests.support.chat import CHAT_PATH, ChatRecord, ask, collect
from tests.support.cluster import Cluster, ClusterPlan, Service, parse_status
from tests.support.http_client import exchange, open_request
from tests.support.polling import eventually
from tests.support.ports import ADMIN_OFFSET
from tests.support.script import Script, counting, padded

BACK_WITHIN_S = 90.0
NUM_GATEWAYS = 2
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def doubled_system() -> Generator[Cluster]:
    """Two of each role that there can be two of; workers hand over after 2 s."""
    plan = ClusterPlan().scripted().prefill(2).decode(2).gateways(NUM_GATEWAYS)
    with plan.setting("drain_timeout_s", 4).start() as cluster:
        yield cluster


@pytest.fixture
async def doubled(doubled_system: Cluster) -> AsyncGenerator[Cluster]:
    """Ready and warm before each test; whole and without leaks after it."""
    await doubled_system.wait_ready(within_s=BACK_WITHIN_S)
    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(ask(doubled_system.port + number % NUM_GATEWAYS, counting(3).body()))
    baseline = await leaks.capture(doubled_system)
    yield doubled_system
    await doubled_system.wait_ready(within_s=BACK_WITHIN_S)
    await leaks.assert_no_leaks(doubled_system, baseline)


async def find(cluster: Cluster, child_id: str) -> Service:
    """By the name that `up` gives it. Raises LookupError or OSError while it is not there."""
    role, number = child_id.split("-")
    port = cluster.port + ADMIN_OFFSET + (int(number) if role == "gateway" else 0)
    answer = await exchange(port, "GET", "/status")
    if answer.status != 200:
        raise LookupError("the gateway is only starting")
    found = parse_status(answer.json()).of_role(role)
    wanted: dict[str, Callable[[Service], bool]] = {
        "gateway": lambda each: each.admin_port == port,
        "scheduler": lambda _: True,
    }
    is_it = wanted.get(role, lambda each: each.id == child_id)
    for service in found:
        if is_it(service):
            return service
    raise LookupError(child_id)


async def wait_restarted(cluster: Cluster, old: Service, child_id: str) -> None:
    """It has ended with code 0, and another process is ready in its place."""
    await eventually(
        lambda: find(cluster, child_id),
        lambda now: now.ready and now.pid != old.pid,
        within_s=BACK_WITHIN_S,
        what=f"a new {child_id} is ready",
    )
    said = [line for line in cluster.log_path.read_text().splitlines() if line.startswith(f"{child_id} ended")]
    assert said
    assert "exit code 0" in said[-1]


async def stop(cluster: Cluster, child_id: str) -> Service:
    """SIGTERM."""
    service = await find(cluster, child_id)
    os.kill(service.live_pid, signal.SIGTERM)
    return service


class PatientClient:
    """Asks one gateway after the other; where the connection is refused, it asks the next one at once."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self._cluster = cluster
        self._number = number
        self.num_answers = 0
        self.num_refused = 0
        self.stopped = asyncio.Event()

    async def run(self) -> None:
        """Until stopped; every answer must be whole."""
        while not self.stopped.is_set():
            script = counting(20 + self._number, step_ms=20, prefill_ms=50)
            record = await self.ask(script)
            assert (script.text(), "stop", None) == (record.text, record.finish_reason, record.error)
            self.num_answers += 1

    async def ask(self, script: Script) -> ChatRecord:
        """One answer, whatever it takes to be connected."""
        body = {**script.body(), "stream": True}
        while True:
            self._number += 1
            port = self._cluster.port + self._number % NUM_GATEWAYS
            async with AsyncExitStack() as stack:
                try:
                    stream = await stack.enter_async_context(open_request(port, "POST", CHAT_PATH, body=body))
                except (ConnectionError, EOFError):  # refused, or reset before a byte came: it was never taken
                    self.num_refused += 1
                    await asyncio.sleep(0.02)
                    continue
                return await collect(stream)


async def test_each_service_is_restarted_in_turn_under_load(doubled: Cluster) -> None:
    """No request fails, and each process ends by itself, with code 0."""
    clients = [PatientClient(doubled, number) for number in range(6)]
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client.run())
        await wait_for_state(doubled, "decoding", 2)
        for child_id in ("decode-0", "decode-1", "prefill-0", "prefill-1", "gateway-1", "gateway-0", "scheduler-0"):
            num_before = sum(client.num_answers for client in clients)
            old = await stop(doubled, child_id)
            await wait_restarted(doubled, old, child_id)
            async with asyncio.timeout(BACK_WITHIN_S):
                while sum(client.num_answers for client in clients) < num_before + len(clients):
                    await asyncio.sleep(0.05)  # each service is back in work before the next one goes
        for client in clients:
            client.stopped.set()
    assert all(client.num_answers > 0 for client in clients)


async def test_a_long_answer_goes_on_at_another_decode_worker(doubled: Cluster) -> None:
    """What does not end in the time of the drain is handed over, token for token."""
    script = counting(500, step_ms=20)
    async with live(doubled, script) as stream:
        record = await collect(stream, until_deltas=2)
        busy = await the_busy(doubled, "decode")
        old = await stop(doubled, busy.id)
        await collect(stream, record=record)
    assert (script.text(), "stop", None) == (record.text, record.finish_reason, record.error)
    await wait_restarted(doubled, old, busy.id)


async def test_a_long_prompt_begins_anew_at_another_prefill_worker(doubled: Cluster) -> None:
    """Its blocks at decode are given back, and taken again."""
    script = padded(["x"], num_prompt_tokens=1_000, prefill_ms=6_000)
    async with live(doubled, script) as stream:
        await wait_for_state(doubled, "prefilling")
        busy = await the_busy(doubled, "prefill")
        old = await stop(doubled, busy.id)
        record = await collect(stream)
    assert (script.text(), "stop", None) == (record.text, record.finish_reason, record.error)
    await wait_restarted(doubled, old, busy.id)


async def is_refused(port: int) -> bool:
    """Whether nobody listens."""
    try:
        await exchange(port, "GET", "/v1/models")
    except ConnectionRefusedError:
        return True
    return False


async def the_busy(cluster: Cluster, role: str) -> Service:
    """The one that holds blocks."""

    async def busy() -> Service:
        for service in (await cluster.status()).of_role(role):
            scraped = await cluster.metrics(service)
            if scraped.total("firsttoken_kv_blocks", state="active") > 0:
                return service
        raise LookupError("none is busy")

    return await eventually(busy, lambda _: True, within_s=30.0, what=f"a busy {role} worker")


async def test_ops_01_streams_of_a_stopped_gateway_end_well(doubled: Cluster) -> None:
    """OPS-01: all five are whole; not ready at once; new connections are refused; it ends soon after, with code 0."""
    scripts = [counting(60 + number, step_ms=20) for number in range(5)]
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(live(doubled, script)) for script in scripts]
        records = [await collect(stream, until_deltas=2) for stream in streams]
        old = await stop(doubled, "gateway-0")
        await eventually(
            lambda: exchange(doubled.admin_port, "GET", "/readyz"),
            lambda answer: answer.status == 503,
            within_s=10.0,
            what="not ready",
        )
        # The listener goes a moment after the signal.
        await eventually(lambda: is_refused(doubled.port), bool, within_s=10.0, what="connections are refused")
        for stream, record in zip(streams, records, strict=True):
            await collect(stream, record=record)
    assert [(script.text(), "stop") for script in scripts] == [
        (record.text, record.finish_reason) for record in records
    ]
    await wait_restarted(doubled, old, "gateway-0")


async def test_a_second_signal_ends_it_at_once(doubled: Cluster) -> None:
    """Whatever runs: that goes on elsewhere."""
    script = counting(200, step_ms=20)
    async with live(doubled, script) as stream:
        record = await collect(stream, until_deltas=2)
        busy = await the_busy(doubled, "decode")
        old = await stop(doubled, busy.id)
        await eventually(
            lambda: find(doubled, busy.id), lambda now: not now.ready, within_s=5.0, what="the first signal has come"
        )
        os.kill(old.live_pid, signal.SIGTERM)
        await collect(stream, record=record)
    assert (script.text(), "stop", None) == (record.text, record.finish_reason, record.error)
    said = [line for line in doubled.log_path.read_text().splitlines() if line.startswith(f"{busy.id} ended")]
    assert "exit code 1" in said[-1]
