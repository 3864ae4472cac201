"""A worker that stood still while its work was given away, and wakes up: its word counts for nothing any more."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack

import pytest

from shared.domain.refusals import RefusedKind
from shared.obs.metrics import REFUSED_TOTAL, REQUEUES_TOTAL
from tests.support.audited import BACK_WITHIN_S, audited
from tests.support.cancelling import holders, live, live_uncached, outcomes, wait_for_state, wait_outcomes
from tests.support.chat import ChatRecord, ask, collect
from tests.support.cluster import Cluster, ClusterPlan, Service
from tests.support.polling import eventually
from tests.support.processes import frozen
from tests.support.refusals import refused
from tests.support.script import Script, counting, padded

ANSWER_WITHIN_S = 120.0
# Its chunks leave one after another over some seconds: whoever is stopped meanwhile is in the middle of its copy.
COPYING = padded([*(f"w{i} " for i in range(30)), "x"], num_prompt_tokens=1_500, prefill_ms=4_000)
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["shm", "grpc"])
def pairs_system(request: pytest.FixtureRequest) -> Generator[Cluster]:
    """Two workers a role; the work of one that stands still for four seconds is given away.

    No sooner: one that is only held up by a busy machine would be the second that the request is lost with.
    """
    plan = ClusterPlan().scripted().prefill(2).decode(2).setting("worker_lost_s", 4)
    with plan.setting("transports", request.param).start() as cluster:
        yield cluster


@pytest.fixture
async def pairs(pairs_system: Cluster) -> AsyncGenerator[Cluster]:
    """Idle and warm before, idle and whole after. What was refused was late, and no damage or bug of anybody."""
    async with audited(pairs_system) as cluster:
        yield cluster
        scheduler = await cluster.metrics((await cluster.status()).one("scheduler"))
        assert 0 == scheduler.total(REFUSED_TOTAL, kind=RefusedKind.ILLEGAL_EVENT)
        assert 0 == scheduler.total(REQUEUES_TOTAL, reason="kv_corrupt")


async def wait_given_up(cluster: Cluster, worker: Service) -> None:
    """The scheduler counts on it no more."""
    await eventually(
        cluster.status,
        lambda status: not any(each.ready for each in status.services if each.id == worker.id),
        within_s=60.0,
        what=f"{worker.id} is given up",
    )


async def num_late(cluster: Cluster, receivers: list[Service]) -> int:
    """Words of senders that these have refused, because the attempt had ended there. Asks nobody else."""
    counts = [refused(await cluster.metrics(receiver)) for receiver in receivers]
    return sum(count.get(RefusedKind.LATE_TRANSFER, 0) for count in counts)


def check(script: Script, record: ChatRecord) -> None:
    """Every token once and in order."""
    assert None is record.error
    assert (script.text(), "stop") == (record.text, record.finish_reason)


@pytest.mark.parametrize("pairs_system", ["shm"], indirect=True)
async def test_a_decode_worker_wakes_up_in_mid_answer(pairs: Cluster) -> None:
    """Its streams have gone on elsewhere: what it still makes is in no answer, and what it holds it gives back."""
    before = await outcomes(pairs)
    scripts = [counting(300 + number, step_ms=20) for number in range(6)]
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(live(pairs, script)) for script in scripts]
        records = [await collect(stream, until_deltas=3) for stream in streams]
        victim = (await holders(pairs, "decode"))[0]
        with frozen(victim.live_pid):
            await wait_given_up(pairs, victim)
            counts = [len(record.deltas) for record in records]
            async with asyncio.timeout(ANSWER_WITHIN_S), asyncio.TaskGroup() as group:
                for stream, record, count in zip(streams, records, counts, strict=True):
                    group.create_task(collect(stream, record=record, until_deltas=count + 5))
        async with asyncio.timeout(ANSWER_WITHIN_S), asyncio.TaskGroup() as group:
            for stream, record in zip(streams, records, strict=True):
                group.create_task(collect(stream, record=record))
    for script, record in zip(scripts, records, strict=True):
        check(script, record)
    await wait_outcomes(pairs, before, finished=len(scripts))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker_wakes_up_in_the_middle_of_a_copy(pairs: Cluster, role: str) -> None:
    """The prompt was computed and copied by others meanwhile; what the old pair still sends is in nobody's answer.

    What a sender says when it wakes up is refused and counted, and no sooner than it says it. (What lay in a frozen
    receiver may also end with its stream, unread.)
    """
    before, status = await outcomes(pairs), await pairs.status()
    receivers, scheduler = status.of_role("decode"), status.one("scheduler")
    async with live_uncached(pairs, COPYING) as stream:
        await wait_for_state(pairs, "prefilling")
        (victim,) = await holders(pairs, role)
        with frozen(victim.live_pid) as thaw:
            await wait_given_up(pairs, victim)
            num_before = await num_late(pairs, receivers) if role == "prefill" else 0
            async with asyncio.timeout(ANSWER_WITHIN_S):
                record = await collect(stream)
            await wait_outcomes(pairs, before, finished=1)
            if role == "prefill":
                assert num_before == await num_late(pairs, receivers)
                with frozen(scheduler.live_pid):  # else it might say first that the work is over
                    thaw()
                    await eventually(
                        lambda: num_late(pairs, receivers),
                        lambda now: now > num_before,
                        within_s=60.0,
                        what="what the woken sender says is refused",
                    )
    check(COPYING, record)
    await pairs.wait_ready(within_s=BACK_WITHIN_S)


async def test_blocks_of_a_copy_that_stands_still_are_nobody_elses(pairs: Cluster) -> None:
    """PDX-01 with real processes: A is cancelled while its sender stands still in mid-copy; others compute meanwhile, and
    are exact when the sender has woken up. (That they take A's blocks: test_kv_transfer.py.)
    """
    async with live_uncached(pairs, COPYING) as stream:
        await wait_for_state(pairs, "prefilling")
        (sender,) = await holders(pairs, "prefill")
        with frozen(sender.live_pid):
            stream.cut()
            scripts = [padded([f"b{i} ", "y"], num_prompt_tokens=1_400 + i, repeat=40) for i in range(6)]
            async with asyncio.timeout(ANSWER_WITHIN_S), asyncio.TaskGroup() as group:
                asked = [group.create_task(ask(pairs.port, script.body())) for script in scripts]
    for script, task in zip(scripts, asked, strict=True):
        assert script.text() == task.result()["choices"][0]["message"]["content"]
