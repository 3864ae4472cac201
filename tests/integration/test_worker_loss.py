"""The only worker of a role dies, stalls or comes back: requests wait for its next start, and no harm lasts.

What happens where another worker can take over is in test_failover.py.
"""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack

import pytest

from shared.domain.refusals import RefusedKind
from shared.obs.metrics import REQUEUES_TOTAL
from tests.support import leaks
from tests.support.audited import audited
from tests.support.cancelling import live, live_uncached, long_decode, outcomes, wait_for_state, wait_outcomes
from tests.support.chat import CHAT_PATH, ChatRecord, ask, collect, stream_chat
from tests.support.cluster import Cluster, ClusterPlan, Service
from tests.support.http_client import HttpStream, exchange
from tests.support.polling import eventually
from tests.support.processes import frozen
from tests.support.refusals import refused
from tests.support.script import Script, counting, padded
from tests.support.stages import held_at

ERROR_WITHIN_S = 30.0
BACK_WITHIN_S = 120.0
PREFILLING = padded(["x"], num_prompt_tokens=1_000, prefill_ms=40_000)
# Where no other test here kills them: those do in mid-prompt and in mid-answer.
LOST_AT = (("waiting for prefill", "prefill"), ("waiting for commit", "prefill"))
LOST_AT_IN_FULL = (*LOST_AT, ("last step", "decode"), ("copying", "prefill"), ("waiting for commit", "decode"))
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def fragile_system() -> Generator[Cluster]:
    """One worker a role, so that a loss is a loss."""
    with ClusterPlan().scripted().start() as cluster:
        yield cluster


@pytest.fixture
async def fragile(fragile_system: Cluster) -> AsyncGenerator[Cluster]:
    """Ready and warm before each test; whole and without leaks after it."""
    await fragile_system.wait_ready(within_s=BACK_WITHIN_S)
    await ask(fragile_system.port, counting(2).body())
    baseline = await leaks.capture(fragile_system)
    yield fragile_system
    await fragile_system.wait_ready(within_s=BACK_WITHIN_S)
    await leaks.assert_no_leaks(fragile_system, baseline)


async def the(cluster: Cluster, role: str) -> Service:
    """The only process of a role."""
    return (await cluster.status()).one(role)


async def readyz(cluster: Cluster) -> int:
    """Status of the gateway's readiness."""
    return (await exchange(cluster.admin_port, "GET", "/readyz")).status


async def wait_served_again(cluster: Cluster, role: str, old: Service) -> None:
    """The restarted worker is a new process and the system answers through it."""
    await eventually(
        lambda: the(cluster, role),
        lambda now: now.ready and now.pid != old.pid,
        within_s=BACK_WITHIN_S,
        what=f"a new {role} worker is ready",
    )
    await eventually(lambda: readyz(cluster), lambda s: s == 200, within_s=BACK_WITHIN_S, what="ready again")
    script = counting(5)
    assert script.text() == (await stream_chat(cluster.port, script.body())).text


async def goes_on(stream: HttpStream, record: ChatRecord) -> None:
    """More text comes, of a worker that was not there before, and it is the right one."""
    async with asyncio.timeout(BACK_WITHIN_S):
        await collect(stream, record=record, until_deltas=len(record.deltas) + 20)
    assert None is record.error
    assert long_decode().text(len(record.deltas)) == record.text


async def test_decode_worker_killed(fragile: Cluster) -> None:
    """Streams in decoding and one in prefill: each goes on at the next start; readiness tells the truth meanwhile."""
    async with AsyncExitStack() as stack:
        decoding = [await stack.enter_async_context(live(fragile, long_decode())) for _ in range(3)]
        records = [await collect(stream, until_deltas=2) for stream in decoding]
        prefilling = await stack.enter_async_context(live_uncached(fragile, PREFILLING))
        await wait_for_state(fragile, "prefilling")
        old = await the(fragile, "decode")
        with frozen(fragile.process.pid):  # nobody starts another before the truth was told
            os.kill(old.live_pid, signal.SIGKILL)
            await eventually(lambda: readyz(fragile), lambda s: s == 503, within_s=ERROR_WITHIN_S, what="not ready")
        async with asyncio.TaskGroup() as group:
            for stream, record in zip(decoding, records, strict=True):
                group.create_task(goes_on(stream, record))
        await wait_for_state(fragile, "prefilling")
        for stream in (prefilling, *decoding):
            stream.cut()
    await wait_served_again(fragile, "decode", old)


async def test_prefill_worker_killed(fragile: Cluster) -> None:
    """PDX-04: half-way through a prompt: it begins anew at the next start; decoding is not touched."""
    going_on = counting(150, step_ms=20)
    async with live(fragile, going_on) as decoding, live_uncached(fragile, PREFILLING) as prefilling:
        record = await collect(decoding, until_deltas=2)
        await wait_for_state(fragile, "prefilling")
        old = await the(fragile, "prefill")
        os.kill(old.live_pid, signal.SIGKILL)
        await collect(decoding, record=record)
        await wait_served_again(fragile, "prefill", old)
        await wait_for_state(fragile, "prefilling")
        prefilling.cut()
    assert going_on.text() == record.text
    assert "stop" == record.finish_reason


async def test_a_whole_answer_whose_worker_dies(fragile: Cluster) -> None:
    """A client without a stream gets the whole text, however often it was begun."""
    script = counting(200, step_ms=20)
    old = await the(fragile, "decode")
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(exchange(fragile.port, "POST", CHAT_PATH, body=script.body()))
        await wait_for_state(fragile, "decoding")
        os.kill(old.live_pid, signal.SIGKILL)

    answer = asking.result()
    assert 200 == answer.status, answer.body[:200]
    assert script.text() == answer.json()["choices"][0]["message"]["content"]
    await wait_served_again(fragile, "decode", old)


@pytest.fixture(scope="module")
def patient_system() -> Generator[Cluster]:
    """Its workers may be stopped for some seconds without being given up: one is lost when its next start says hello."""
    with ClusterPlan().scripted().setting("worker_lost_s", 60).setting("step_stall_s", 60).start() as cluster:
        yield cluster


async def num_requeued(cluster: Cluster) -> float:
    """Attempts that were followed by another: for a lost worker, or for blocks promised to one that is long in coming."""
    return (await cluster.metrics(await the(cluster, "scheduler"))).total(REQUEUES_TOTAL)


async def test_a_worker_is_killed_at_each_stage_of_a_handover(patient_system: Cluster, sweep: int) -> None:
    """PDX-04: prefill before it starts, and when it is done but decode, which stands still and wakes to what is over, has
    not taken all of it; `make sweep`: in mid-copy; decode before the commit, and when only the end is missing. The
    request is tried again; each token is there once, and is counted once.
    """
    async with audited(patient_system) as cluster:
        for stage, role in LOST_AT_IN_FULL if sweep >= 100 else LOST_AT:
            await cluster.wait_ready(within_s=BACK_WITHIN_S)
            before, requeued = await outcomes(cluster), await num_requeued(cluster)
            usage = {"stream_options": {"include_usage": True}}
            async with asyncio.timeout(BACK_WITHIN_S), held_at(cluster, stage, 1, port=cluster.port, **usage) as held:
                (stream,), script = held.streams, held.script
                record = await collect(stream, until_deltas=2 if stage == "last step" else 0)
                os.kill((await the(cluster, role)).live_pid, signal.SIGKILL)
                await eventually(
                    lambda: num_requeued(cluster),
                    lambda now, requeued=requeued: now > requeued,
                    within_s=BACK_WITHIN_S,
                    what=f"{stage}: {role} is lost",
                )
                held.thaw()
                await collect(stream, record=record)
            counts = [(record.usage or {})[name] for name in ("prompt_tokens", "completion_tokens")]
            assert (script.text(), "stop", None) == (record.text, record.finish_reason, record.error), (stage, role)
            assert [script.num_prompt_tokens, script.num_pieces + 1] == counts, (stage, role)
            await wait_outcomes(cluster, before, finished=1)


@pytest.mark.timeout(1_800)  # for a sweep
async def test_workers_restarted_again_and_again(fragile: Cluster, sweep: int) -> None:
    """PDX-05: kill -9 of each role in turn, under load: after each restart the first request works, and its peer lives on."""
    num_rounds = max(2, sweep // 5)  # twenty with `make sweep`: `up` waits longer from restart to restart
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        load = [group.create_task(ask_on(fragile, counting(5 + number, step_ms=5), stop)) for number in range(3)]
        for role, peer in (("prefill", "decode"), ("decode", "prefill")) * num_rounds:
            old, living = await the(fragile, role), await the(fragile, peer)
            async with live(fragile, long_decode()) as stream:
                record = await collect(stream, until_deltas=1)
                os.kill(old.live_pid, signal.SIGKILL)
                await wait_served_again(fragile, role, old)
                await goes_on(stream, record)
                stream.cut()
            assert living == await the(fragile, peer)
        stop.set()
    assert all(task.result() > 0 for task in load)


async def ask_on(cluster: Cluster, script: Script, stop: asyncio.Event) -> int:
    """One question after the other; how many were answered. One that fails is asked again."""
    num_answered = 0
    while not stop.is_set():
        answer = await exchange(cluster.port, "POST", CHAT_PATH, body=script.body())
        if answer.status == 200:
            assert script.text() == answer.json()["choices"][0]["message"]["content"]
            num_answered += 1
        else:  # not placed for 5 s; or so slow, on a busy machine, that it has met two of the restarts
            assert answer.json()["error"]["code"] in ("no_capacity", "request_poisoned"), answer.body
    return num_answered


async def test_a_frozen_decode_worker(fragile: Cluster) -> None:
    """SIGSTOP: its streams wait; when it wakes up it is fenced, holds nothing old, and its streams go on there."""
    old = await the(fragile, "decode")
    async with live(fragile, long_decode()) as stream:
        record = await collect(stream, until_deltas=2)
        os.kill(old.live_pid, signal.SIGSTOP)
        try:
            await eventually(
                lambda: readyz(fragile), lambda s: s == 503, within_s=ERROR_WITHIN_S, what="the worker is given up"
            )
        finally:
            os.kill(old.live_pid, signal.SIGCONT)
        await goes_on(stream, record)
        stream.cut()
    await fragile.wait_ready(within_s=BACK_WITHIN_S)
    script = counting(5)
    assert script.text() == (await stream_chat(fragile.port, script.body())).text


async def test_new_requests_while_a_pool_is_empty(fragile: Cluster) -> None:
    """A request that comes while no prefill worker is there gets a 503 or waits and is answered; never an empty 200."""
    old = await the(fragile, "prefill")
    os.kill(old.live_pid, signal.SIGKILL)
    script = counting(5)

    async with asyncio.timeout(BACK_WITHIN_S):
        answer = await exchange(fragile.port, "POST", CHAT_PATH, body=script.body())

    if answer.status == 200:
        assert script.text() == answer.json()["choices"][0]["message"]["content"]
    else:
        assert 503 == answer.status, answer.body
        assert answer.json()["error"]["code"] in ("no_capacity", "worker_lost")
    await wait_served_again(fragile, "prefill", old)


async def test_a_short_answer_outlives_its_scheduler(fragile: Cluster) -> None:
    """Decode works on without a scheduler: an answer that ends before the new one is there is complete and exact."""
    script = counting(20, step_ms=10)
    old = await the(fragile, "scheduler")
    async with live(fragile, script) as stream:
        record = await collect(stream, until_deltas=1)
        os.kill(old.live_pid, signal.SIGKILL)
        await collect(stream, record=record)
    assert (script.text(), "stop") == (record.text, record.finish_reason)
    await wait_served_again(fragile, "scheduler", old)


async def test_gateway_killed(fragile: Cluster) -> None:
    """Its streams are cut; after the grace the scheduler has cancelled them, and all blocks are free."""
    old = await the(fragile, "gateway")
    async with live(fragile, long_decode()) as stream:
        await collect(stream, until_deltas=2)
        os.kill(old.live_pid, signal.SIGKILL)
        with pytest.raises((OSError, EOFError)):
            await collect(stream)
    await wait_served_again(fragile, "gateway", old)


async def exact(cluster: Cluster, script: Script) -> None:
    """The answer is whole."""
    record = await stream_chat(cluster.port, script.body())
    assert (script.text(), None) == (record.text, record.error)


async def test_one_of_two_workers_dies_under_load() -> None:
    """With two workers a role, each role loses one in turn: all streams are exact, new requests are served."""
    with ClusterPlan().scripted().prefill(2).decode(2).start() as cluster:
        await ask(cluster.port, counting(3).body())
        baseline = await leaks.capture(cluster)
        for role in ("decode", "prefill"):
            victim = (await cluster.wait_ready()).of_role(role)[0]
            scripts = [counting(60 + i, step_ms=20, prefill_ms=200) for i in range(16)]
            async with asyncio.TaskGroup() as group:
                for script in scripts:
                    group.create_task(exact(cluster, script))
                await wait_for_state(cluster, "decoding", 2)
                os.kill(victim.live_pid, signal.SIGKILL)
                for script in scripts[:4]:
                    group.create_task(exact(cluster, script))
        await cluster.wait_ready(within_s=BACK_WITHIN_S)
        await leaks.assert_no_leaks(cluster, baseline)


@pytest.fixture(scope="module")
def strict_system() -> Generator[Cluster]:
    """A busy worker whose step takes longer than 2 s is lost; one that is stopped fails its hand-overs, and is not lost.

    One failed attempt in a minute is tried again.
    """
    plan = ClusterPlan().scripted().setting("step_stall_s", 2).setting("worker_lost_s", 60)
    with plan.setting("retry_share", 0).setting("retry_floor", 1).start() as cluster:
        yield cluster


async def test_a_stalled_engine(strict_system: Cluster) -> None:
    """OPS-02: heartbeats go on but no step ends: readiness says so. The request that does it twice is taken for the cause."""
    async with audited(strict_system) as cluster, live(cluster, counting(5, step_ms=6_000)) as stream:
        async with asyncio.timeout(2 * BACK_WITHIN_S), asyncio.TaskGroup() as group:
            group.create_task(
                eventually(lambda: readyz(cluster), lambda s: s == 503, within_s=ERROR_WITHIN_S, what="not ready")
            )
            ending = group.create_task(collect(stream))
        assert "request_poisoned" == (ending.result().error or {})["code"]
        await cluster.wait_ready(within_s=BACK_WITHIN_S)
        script = counting(5)
        assert script.text() == (await stream_chat(cluster.port, script.body())).text


async def num_without_budget(cluster: Cluster) -> int:
    """Attempts that were not tried again, because too many were."""
    return refused(await cluster.metrics(await the(cluster, "scheduler"))).get(RefusedKind.RETRY_BUDGET, 0)


async def test_a_budget_for_retries(strict_system: Cluster) -> None:
    """Two hand-overs fail: one request is tried again and finishes, the other ends with what its attempt failed of. A lost
    worker is no such failure: what it takes with it goes on when the budget is spent.
    """
    async with audited(strict_system) as cluster:
        before = await outcomes(cluster)
        scripts = [counting(20 + number) for number in range(2)]
        async with AsyncExitStack() as stack:
            with frozen((await the(cluster, "prefill")).live_pid):
                streams = [await stack.enter_async_context(live(cluster, script)) for script in scripts]
                await eventually(
                    lambda: num_without_budget(cluster),
                    lambda count: count > 0,
                    within_s=60.0,
                    what="the budget is spent",
                )
            async with asyncio.timeout(BACK_WITHIN_S), asyncio.TaskGroup() as group:
                reading = [group.create_task(collect(stream)) for stream in streams]
        records = [task.result() for task in reading]
        assert ["", "kv_transfer_failed"] == sorted((record.error or {}).get("code", "") for record in records)
        for script, record in zip(scripts, records, strict=True):
            expected = ("", None) if record.error else (script.text(), "stop")
            assert expected == (record.text, record.finish_reason)

        going_on = counting(100, step_ms=20)
        async with live(cluster, going_on) as stream:
            record = await collect(stream, until_deltas=3)
            os.kill((await the(cluster, "decode")).live_pid, signal.SIGKILL)
            await collect(stream, record=record)
        assert (going_on.text(), "stop", None) == (record.text, record.finish_reason, record.error)
        await wait_outcomes(cluster, before, finished=2, failed=1)
        assert 1 == await num_without_budget(cluster)
