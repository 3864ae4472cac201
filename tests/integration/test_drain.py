"""Services are stopped one after the other: what runs ends, or goes on elsewhere; nothing new is lost on the way."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.support import leaks, processes
from tests.support.cancelling import live, live_uncached, long_decode, wait_for_state
from tests.support.chat import CHAT_PATH, ChatRecord, ask, collect
from tests.support.cluster import Cluster, ClusterPlan, Service, parse_status
from tests.support.http_client import exchange, open_request
from tests.support.polling import eventually
from tests.support.ports import ADMIN_OFFSET
from tests.support.process_logs import num_attempts
from tests.support.redis_server import own_redis
from tests.support.resuming import ask_resumable, read_on, resume
from tests.support.script import Script, counting, padded
from tests.support.standby import STOP_WITHIN_S, standby, wait_standby

BACK_WITHIN_S = 90.0
NUM_GATEWAYS = 2
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def doubled_system() -> Generator[Cluster]:
    """Two of each role that `up` keeps several of; workers hand over after some seconds.

    On a Redis that is not its own, so that its scheduler obeys the lease rules of several. Of the ten seconds that a
    gateway waits for a scheduler the wait for an absent lease takes one, not three: the rest is for a slow machine.
    """
    plan = ClusterPlan().scripted().prefill(2).decode(2).gateways(NUM_GATEWAYS).setting("lease_absent_s", 1)
    with (
        own_redis() as redis,
        plan.redis_url(redis.url).setting("redis_timeout_s", 10).setting("drain_timeout_s", 4).start() as cluster,
    ):
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
    assert "exit code 0" in last_end(cluster, child_id)


def last_end(cluster: Cluster, child_id: str) -> str:
    """What `up` has said of it."""
    return [line for line in cluster.log_path.read_text().splitlines() if line.startswith(f"{child_id} ended")][-1]


async def stop(cluster: Cluster, child_id: str) -> Service:
    """SIGTERM. It is there, but the gateway may not hear of it at once from a scheduler that is busy."""
    service = await eventually(
        lambda: find(cluster, child_id), lambda _: True, within_s=BACK_WITHIN_S, what=f"{child_id} is there"
    )
    os.kill(service.live_pid, signal.SIGTERM)
    return service


class PatientClient:
    """Asks one gateway after the other; where the connection is refused, and only there, it asks the next one at once."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self._cluster = cluster
        self._number = number
        self.num_answers = 0
        self.num_refused = 0
        self.stopped = asyncio.Event()

    async def run(self) -> None:
        """Until stopped; every answer must be whole."""
        while not self.stopped.is_set():
            script = counting(10 + self._number % 10, step_ms=20, prefill_ms=50)
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
                except ConnectionRefusedError:
                    self.num_refused += 1
                    await asyncio.sleep(0.02)
                    continue
                return await collect(stream)


async def wait_active(cluster: Cluster, pid: int) -> None:
    """The scheduler of this process schedules."""
    await eventually(
        cluster.status,
        lambda status: status.one("scheduler").pid == pid and status.one("scheduler").ready,
        within_s=BACK_WITHIN_S,
        what=f"scheduler {pid} is the active one",
    )


async def wait_all_served(clients: list[PatientClient]) -> None:
    """Each has got another answer, whose gateway and workers were chosen by now."""
    wanted = [client.num_answers + 2 for client in clients]
    async with asyncio.timeout(BACK_WITHIN_S):
        while any(client.num_answers < num for client, num in zip(clients, wanted, strict=True)):
            await asyncio.sleep(0.05)


async def restart_both_schedulers(cluster: Cluster, log: Path, clients: list[PatientClient]) -> None:
    """The active one and its standby, in turn: each hands over to the other, and is a standby when it is back."""
    kept = (await cluster.status()).one("scheduler")
    kept_log = (cluster.log_folder or log) / "scheduler-0.log"
    with standby(kept, log) as other:
        await wait_standby(log, within_s=BACK_WITHIN_S)
        await stop(cluster, "scheduler-0")
        await wait_active(cluster, other.pid)
        await wait_standby(kept_log, within_s=BACK_WITHIN_S)
        assert "exit code 0" in last_end(cluster, "scheduler-0")
        await wait_all_served(clients)
        other.terminate()
        assert 0 == await asyncio.to_thread(other.wait, STOP_WITHIN_S)
        await wait_restarted(cluster, kept, "scheduler-0")
    with standby(kept_again := (await cluster.status()).one("scheduler"), log):
        await wait_standby(log, within_s=BACK_WITHIN_S)
        await wait_active(cluster, kept_again.live_pid)
        await wait_all_served(clients)


async def test_each_service_is_restarted_in_turn_under_load(doubled: Cluster, tmp_path: Path) -> None:
    """Two of each role. No request fails, though clients ask again only where they are refused; all end with code 0."""
    clients = [PatientClient(doubled, number) for number in range(6)]
    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(client.run())
        await wait_for_state(doubled, "decoding", 2)
        for child_id in ("decode-0", "decode-1", "prefill-0", "prefill-1", "gateway-1", "gateway-0"):
            old = await stop(doubled, child_id)
            await wait_restarted(doubled, old, child_id)
            await wait_all_served(clients)  # each service is back in work before the next one goes
        await restart_both_schedulers(doubled, tmp_path / "standby.log", clients)
        for client in clients:
            client.stopped.set()
    assert sum(client.num_refused for client in clients) > 0


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


async def test_what_outlasts_the_drain_of_its_gateway(doubled: Cluster) -> None:
    """A resumable answer is handed over: its client is cut off without a word, and reads on at the other gateway. A plain
    one is told and cancelled. Both have been served until then.
    """
    script = long_decode()
    async with ask_resumable(doubled.port, script) as (stream, read), live(doubled, script) as plain:
        await read_on(stream, read, max_events=3)
        record = await collect(plain, until_deltas=2)
        old = await stop(doubled, "gateway-0")
        async with asyncio.TaskGroup() as group:
            group.create_task(read_on(stream, read))
            group.create_task(collect(plain, record=record))
    assert (False, "draining") == (read.is_over, (record.error or {})["code"])
    assert (True, True) == (read.num_events > 3, len(record.deltas) > 2)
    async with resume(doubled.port + 1, read) as resumed:
        await read_on(resumed, read, max_events=30)
        assert (script.text(read.last_id), None) == (read.text, read.error)
        assert 200 == (await exchange(doubled.port + 1, "DELETE", f"/v1/streams/{read.request_id}")).status
    assert script.text(len(record.deltas)) == record.text
    await wait_restarted(doubled, old, "gateway-0")


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


@pytest.fixture(scope="module")
def plain_system() -> Generator[Cluster]:
    """One of each, with the drain limit that is set where nobody sets one: 30 s. A worker may be stopped for some seconds."""
    with ClusterPlan().scripted().setting("worker_lost_s", 20).start() as cluster:
        yield cluster


@pytest.fixture
async def plain(plain_system: Cluster) -> AsyncGenerator[Cluster]:
    """Ready and warm before each test; whole and without leaks after it."""
    await plain_system.wait_ready(within_s=BACK_WITHIN_S)
    await ask(plain_system.port, counting(3).body())
    baseline = await leaks.capture(plain_system)
    yield plain_system
    await plain_system.wait_ready(within_s=BACK_WITHIN_S)
    await leaks.assert_no_leaks(plain_system, baseline)


async def wait_draining(service: Service) -> None:
    """By its own word; at once, unless the machine is busy. It is alive, all the same."""
    await eventually(
        lambda: exchange(service.admin_port, "GET", "/readyz"),
        lambda answer: (503, "draining") == (answer.status, answer.json()["reason"]),
        within_s=40.0,
        what=f"{service.id} is not ready",
    )
    assert 200 == (await exchange(service.admin_port, "GET", "/healthz")).status


async def test_ops_01_streams_of_a_stopped_gateway_end_well(plain: Cluster) -> None:
    """OPS-01: five streams with 8 s left end well in the 30 s of the drain; what comes new is refused; then it ends, with
    code 0 and long before the limit.
    """
    scripts = [counting(402 + number, step_ms=20) for number in range(5)]
    clock = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(live(plain, script)) for script in scripts]
        records = [await collect(stream, until_deltas=2) for stream in streams]
        old = await stop(plain, "gateway-0")
        await wait_draining(old)
        await eventually(lambda: is_refused(plain.port), bool, within_s=40.0, what="connections are refused")
        for stream, record in zip(streams, records, strict=True):
            await collect(stream, record=record)  # to its [DONE]
        ended_at = clock.time()
    assert [(script.text(), "stop", None) for script in scripts] == [
        (record.text, record.finish_reason, record.error) for record in records
    ]
    await processes.wait_gone(old.live_pid)
    assert clock.time() - ended_at < 15  # one that waited for its limit would take 22 s more
    await wait_restarted(plain, old, "gateway-0")


async def says_that_it_drains(service: Service) -> bool:
    """False where it has ended before anybody came to ask."""
    while processes.is_live(service.live_pid):
        try:
            ready = await exchange(service.admin_port, "GET", "/readyz")
            if ready.status == 503:
                assert "draining" == ready.json()["reason"]
                return 200 == (await exchange(service.admin_port, "GET", "/healthz")).status
        except (OSError, EOFError):
            pass  # it ends
        await asyncio.sleep(0.02)
    return False


async def test_a_stopped_scheduler_says_so_and_lives_on_for_a_while(plain: Cluster) -> None:
    """An answer runs, which another scheduler is to adopt: not ready at once, and alive until it has handed over."""
    script = long_decode()
    async with live(plain, script) as stream:
        record = await collect(stream, until_deltas=2)
        for _ in range(3):  # it takes 2 s at most, in which a busy machine may give us no turn
            old = await stop(plain, "scheduler-0")
            has_said_so = await says_that_it_drains(old)
            await wait_restarted(plain, old, "scheduler-0")
            if has_said_so:
                break
        else:
            raise AssertionError("three schedulers have ended without a word")
        await collect(stream, record=record, until_deltas=len(record.deltas) + 20)
        assert (script.text(len(record.deltas)), None) == (record.text, record.error)
        stream.cut()


async def test_a_stopped_prefill_worker_brings_its_cache_first(plain: Cluster) -> None:
    """What it has computed is not computed again: it ends when decode, which stands still meanwhile, has everything."""
    script = padded(["x", "y", "z"], num_prompt_tokens=1_000, prefill_ms=500)
    status = await plain.status()
    async with AsyncExitStack() as stack:
        with processes.frozen(status.one("prefill").live_pid):  # nothing is sent before decode stands still
            stream = await stack.enter_async_context(live_uncached(plain, script))
            await wait_for_state(plain, "prefilling")
            thaw = stack.enter_context(processes.frozen(status.one("decode").live_pid))
        await wait_for_state(plain, "transferring")
        old = await stop(plain, "prefill-0")
        await wait_draining(old)
        thaw()
        record = await collect(stream)
    assert (script.text(), "stop", None) == (record.text, record.finish_reason, record.error)
    await wait_restarted(plain, old, "prefill-0")
    assert 1 == await num_attempts(plain, record.request_id)


async def test_a_second_signal_ends_each_service_at_once(plain: Cluster) -> None:
    """While they drain, with a prompt and an answer that would hold them up for half a minute."""
    roles = ("gateway", "prefill", "decode")
    prompt = padded(["x"], num_prompt_tokens=1_000, prefill_ms=60_000)
    async with live(plain, counting(3_000, step_ms=20)) as decoding, live_uncached(plain, prompt):
        await collect(decoding, until_deltas=2)
        await wait_for_state(plain, "prefilling")
        status = await plain.status()
        services = [status.one(role) for role in roles]
        for service in services:
            os.kill(service.live_pid, signal.SIGTERM)
        for service in services:
            await wait_draining(service)
        for service in services:
            os.kill(service.live_pid, signal.SIGTERM)
        # A scheduler drains for 2 s at most: it gets both in one moment.
        scheduler = status.one("scheduler")
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(scheduler.live_pid, number)
        for service in (*services, scheduler):
            await processes.wait_gone(service.live_pid)
    await plain.wait_ready(within_s=BACK_WITHIN_S)
    for role in (*roles, "scheduler"):
        assert "exit code 1" in last_end(plain, f"{role}-0"), role
