"""PDX-06, CAN-04: crowds that end at each stage of their lives, by every cause and way, at either of two gateways; the
audit of the fixture finds nothing left.

A few a stage here; `make sweep` takes every cause at every stage, a hundred clients that leave at each, ten rounds of the
causes that take their time, and five hundred cancels at random moments (test_cancel.py).
"""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Sequence
from contextlib import AsyncExitStack
from itertools import cycle, islice

import pytest

from tests.support import leaks
from tests.support.cancelling import long_decode, outcomes, wait_for_state, wait_outcomes
from tests.support.chat import CHAT_PATH, ask, collect
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.http_client import HttpStream, exchange, open_request
from tests.support.polling import eventually
from tests.support.processes import frozen
from tests.support.redis_server import connect
from tests.support.script import counting
from tests.support.stages import NUM_FILLERS, STAGES, Held, at_once, held_at

FULL_SWEEP = 100
# Who waits for a deadline, or for a gateway to be started again, waits once a round.
MAX_ROUNDS = {"client": 3, "deadline": 1, "lost gateway": 1}
MAX_ROUNDS_IN_FULL = {"client": FULL_SWEEP, "deadline": 10, "lost gateway": 10}
ENDED_WITHIN_S = 60.0
MAX_LATE = 10
MAX_TOGETHER = {
    ("last step", "lost gateway"): 1,
    ("last step", "deadline"): 1,
}  # who joins a step later is a step behind
DEADLINE_S = 8.0  # as long as a crowd may need to get where it is to be late, on a busy machine
GATEWAY_GRACE_S = 2.0
CAUSES = ("client", "deadline", "lost gateway")
CASES = [(stage, cause) for stage in STAGES for cause in CAUSES]
# What is late at the other stages is in test_deadlines.
SHORT_SWEEP = {
    *((stage, "client") for stage in STAGES),
    ("waiting for commit", "deadline"),
    ("last step", "deadline"),
    ("decoding", "lost gateway"),
}
PROMPT_COMPUTED = ("handshake", "copying", "waiting for commit", "decoding", "parked", "last step")
ANSWER_BEGUN = ("decoding", "parked", "last step")
WASTED = "firsttoken_wasted_tokens_total"
pytestmark = pytest.mark.timeout(1_800)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every case of a full sweep, the chosen ones of a short one."""
    if "cause" in metafunc.fixturenames:
        sweep: object = metafunc.config.getoption("--sweep")
        is_full = isinstance(sweep, int) and sweep >= FULL_SWEEP
        metafunc.parametrize(("stage", "cause"), [case for case in CASES if is_full or case in SHORT_SWEEP])


@pytest.fixture(scope="module")
def sweep_system() -> Generator[Cluster]:
    """Two gateways; workers may be stopped, or need for a step, some seconds without being given up."""
    plan = ClusterPlan().scripted().gateways(2).setting("step_stall_s", 20)
    with plan.setting("worker_lost_s", 20).setting("gateway_grace_s", GATEWAY_GRACE_S).start() as cluster:
        yield cluster


@pytest.fixture
async def swept(sweep_system: Cluster) -> AsyncGenerator[Cluster]:
    """Idle and warm before, idle and whole after."""
    await sweep_system.wait_ready()
    for port in ports(sweep_system):
        await ask(port, counting(3).body())
    baseline = await leaks.capture(sweep_system, is_warm=True)
    yield sweep_system
    await sweep_system.wait_ready()
    await leaks.assert_no_leaks(sweep_system, baseline)


def ports(cluster: Cluster) -> tuple[int, int]:
    """Of the two gateways."""
    return cluster.port, cluster.port + 1


async def end_by(cluster: Cluster, cause: str, held: Held, *, num_before: int, after_deltas: int) -> None:
    """Returns when the scheduler knows of every end; whoever was stopped goes on then. `num_before` have ended before."""
    match cause:
        case "client":
            await leave(cluster, held.streams, num_before=num_before, after_deltas=after_deltas)
        case "lost gateway":
            for stream in held.streams:
                await collect(stream, until_deltas=after_deltas)
            _, second = await cluster.gateways()
            os.kill(second.live_pid, signal.SIGKILL)
        case _:
            pass  # their time is running
    await eventually(
        cluster.status,
        lambda s: sum(n for state, n in s.live_requests.items() if state != "aborting") <= held.num_others,
        within_s=ENDED_WITHIN_S,
        what="every end has been told",
    )
    held.thaw()


async def leave(cluster: Cluster, streams: Sequence[HttpStream], *, num_before: int, after_deltas: int) -> None:
    """A fourth of the clients each way, also where each is a crowd by itself."""

    async def leave_by(stream: HttpStream, way: Callable[[HttpStream], Awaitable[None]]) -> None:
        await collect(stream, until_deltas=after_deltas)
        await way(stream)

    async def reset(stream: HttpStream) -> None:
        stream.cut()

    def delete_at(port: int) -> Callable[[HttpStream], Awaitable[None]]:
        async def delete(stream: HttpStream) -> None:
            answer = await exchange(port, "DELETE", f"/v1/requests/{stream.headers['x-firsttoken-request']}")
            assert answer.status in (200, 202), answer.body
            assert "cancelled" == answer.json()["outcome"]

        return delete

    here, there = ports(cluster)
    ways = islice(cycle((delete_at(there), reset, HttpStream.close, delete_at(here))), num_before, None)
    async with asyncio.TaskGroup() as group:
        for stream in streams:
            group.create_task(leave_by(stream, next(ways)))


async def wasted(cluster: Cluster) -> Counter[tuple[str, str]]:
    """Tokens by cause and stage."""
    (metrics,) = await cluster.role_metrics("scheduler")
    return Counter({(s.labels["cause"], s.labels["stage"]): int(s.value) for s in metrics.all(WASTED)})


async def check_records(cluster: Cluster, request_ids: Sequence[str], state: str) -> None:
    """Each has its end in Redis, with a time to live; it is written when it has been told."""
    redis = (await cluster.status()).one("redis")
    with connect(f"redis://{redis.address}/0") as client:

        async def record(request_id: str) -> tuple[str | None, bool]:
            key = f"firsttoken:1:request:{{{request_id}}}"
            return client.hget(key, "state"), client.ttl(key) > 0

        for request_id in request_ids:
            await eventually(
                lambda request_id=request_id: record(request_id),
                lambda found: found == (state, True),
                within_s=ENDED_WITHIN_S,
                what=f"{request_id} is {state}, with a time to live",
            )


async def test_a_crowd_at_one_stage(swept: Cluster, stage: str, cause: str, sweep: int) -> None:
    """All end, once each and as what they are; every count is back at idle (by the fixture); what was computed for them
    counts as wasted, by its cause and at its stage.
    """
    before, wasted_before = await outcomes(swept), await wasted(swept)
    max_rounds = MAX_ROUNDS[cause] if sweep < FULL_SWEEP else MAX_ROUNDS_IN_FULL[cause]
    # A crowd is not larger than can get in time to where it is to end together.
    size = min(at_once(stage), MAX_TOGETHER.get((stage, cause), MAX_LATE if cause == "deadline" else sweep))
    num_left = num = min(sweep, max_rounds * size)
    port, other_port = reversed(ports(swept)) if cause == "lost gateway" else ports(swept)
    late = {"timeout": DEADLINE_S} if cause == "deadline" else {}
    end = "failed" if cause == "deadline" else "cancelled"
    num_rounds = num_prompt_tokens = 0
    while num_left:
        async with held_at(swept, stage, min(num_left, size), port=port, **late) as held:
            after_deltas = 2 if stage == "last step" else 0
            await end_by(swept, cause, held, num_before=num - num_left, after_deltas=after_deltas)
        num_prompt_tokens += held.num_prompt_tokens
        num_left, num_rounds = num_left - len(held.streams), num_rounds + 1
        await eventually(swept.status, lambda s: not s.live_requests, within_s=ENDED_WITHIN_S, what="all have ended")
        await check_records(swept, [stream.headers["x-firsttoken-request"] for stream in held.streams], end)
        if cause == "lost gateway":
            await swept.wait_ready()
        else:
            port, other_port = other_port, port

    ended = Counter({"cancelled": NUM_FILLERS * num_rounds if stage == "queued" else 0})
    ended[end] += num
    await wait_outcomes(swept, before, **ended)
    in_vain = await wasted(swept)
    in_vain.subtract(wasted_before)
    named = "deadline" if cause == "deadline" else "cancelled"
    prefill, decode, again = in_vain[named, "prefill"], in_vain[named, "decode"], in_vain["requeued", "prefill"]
    if stage in PROMPT_COMPUTED:
        assert prefill > 0, in_vain
        assert prefill + again >= num_prompt_tokens, in_vain
        assert again or prefill == num_prompt_tokens, in_vain
    if stage == "prefilling":
        assert 0 < prefill <= num_prompt_tokens, in_vain
    if stage in ANSWER_BEGUN:
        assert decode >= num, in_vain
    if stage in ("queued", "placing", "prefilling"):  # elsewhere whoever wakes up may begin before he hears of the end
        assert 0 == decode, in_vain


async def test_a_crowd_that_its_gateway_holds(swept: Cluster, sweep: int) -> None:
    """The scheduler stands still: no client has heard anything, not even its request's id, and all have left before it
    goes on. They end there as cancelled; one that stood still for too long is replaced, and never heard of them.
    """
    num_left = sweep
    while num_left:
        before, gateways = await outcomes(swept), await swept.gateways()
        scheduler, num = (await swept.status()).one("scheduler"), min(num_left, 20)

        async def held() -> float:
            scrapes = [await swept.metrics(gateway) for gateway in gateways]  # noqa: B023 - awaited in this round
            return sum(scraped.total("firsttoken_active_streams") for scraped in scrapes)

        with frozen(scheduler.live_pid):
            async with asyncio.TaskGroup() as group:
                body = {**counting(3).body(), "stream": True}
                asking = [
                    group.create_task(exchange(port, "POST", CHAT_PATH, body=body))
                    for port, _ in zip(cycle(ports(swept)), range(num), strict=False)
                ]
                await eventually(held, lambda count, num=num: count == num, within_s=ENDED_WITHIN_S, what="all held")
                for task in asking:
                    task.cancel()
        num_left -= num
        status = await swept.wait_ready()
        await eventually(held, lambda count: count == 0, within_s=ENDED_WITHIN_S, what="no gateway holds one")
        await eventually(swept.status, lambda s: not s.live_requests, within_s=ENDED_WITHIN_S, what="all have ended")
        if status.one("scheduler").pid == scheduler.pid:
            await wait_outcomes(swept, before, cancelled=num)


async def test_by_exactly_the_id_and_by_its_own_client(swept: Cluster) -> None:
    """CAN-04: at the gateway that does not own it, and at the one that does: an empty id is 400, a shorter, longer or
    unknown one, one of several answers, and another client's are 404 and end nothing; its own client ends it alone.
    """
    here, there = ports(swept)
    mine, other = {"Authorization": "Bearer mine"}, {"Authorization": "Bearer other"}
    slow = long_decode(step_ms=200)  # nobody's answer is parked for want of a reader meanwhile

    async def delete(port: int, text: str, headers: dict[str, str], path: str = "/v1/requests/") -> int:
        return (await exchange(port, "DELETE", path + text, headers=headers)).status

    async with AsyncExitStack() as stack:

        async def begin(headers: dict[str, str], **parameters: object) -> HttpStream:
            body = {**slow.body(**parameters), "stream": True}
            stream = await stack.enter_async_context(open_request(here, "POST", CHAT_PATH, body=body, headers=headers))
            assert 200 == stream.status, await stream.read_body()
            return stream

        one, pair, bystander = await begin(mine), await begin(mine, n=2), await begin(other)
        await wait_for_state(swept, "decoding", 4)
        one_id, pair_id = (stream.headers["x-firsttoken-request"] for stream in (one, pair))
        for port in (there, here):
            unknown = [one_id[:-1], one_id[:3], one_id + "0", f"{one_id}.0", f"{pair_id}.0", "0" * 26, "*", "r-1"]
            assert [404] * len(unknown) == [await delete(port, text, mine) for text in unknown]
            assert [400, 400] == [await delete(port, text, mine) for text in ("", "chatcmpl-")]
            for path in ("/v1/requests/", "/v1/streams/"):
                foreign = [(request_id, headers) for request_id in (one_id, pair_id) for headers in (other, {})]
                assert [404] * 4 == [await delete(port, *each, path) for each in foreign]
        assert {"decoding": 4} == (await swept.status()).live_requests

        async def end(text: str, path: str, num_left: int) -> None:
            assert await delete(there, text, mine, path) in (200, 202)
            await eventually(
                swept.status,
                lambda s: {"decoding": num_left} == s.live_requests,
                within_s=ENDED_WITHIN_S,
                what="it has ended, and nothing else",
            )

        await end(f"chatcmpl-{one_id}", "/v1/requests/", 3)
        assert "cancelled" == ((await collect(one)).error or {})["code"]
        assert [404, 200] == [await delete(here, one_id, headers) for headers in (other, mine)]
        record = await collect(bystander, until_deltas=5)
        assert slow.text(5) == record.text
        await end(pair_id, "/v1/streams/", 1)
