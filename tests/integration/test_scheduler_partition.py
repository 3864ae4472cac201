"""The active scheduler cannot reach Redis, and everybody else can: the standby takes its place, and its work."""

import asyncio
from pathlib import Path

import pytest

from tests.support import chaos_run, chaos_schedule, leaks
from tests.support.chaos_faults import active_scheduler_port
from tests.support.chaos_links import Holders
from tests.support.chat import CHAT_PATH, ChatRecord, collect
from tests.support.http_client import exchange, open_request
from tests.support.polling import eventually
from tests.support.script import Script, counting

WITHIN_S = 90.0
pytestmark = pytest.mark.timeout(600)


async def answered(port: int, script: Script) -> ChatRecord:
    """A stream to its end. On a busy machine Redis may miss its half second: what is refused is asked again."""
    async with asyncio.timeout(WITHIN_S):
        while True:
            body = {**script.body(), "stream": True}
            async with open_request(port, "POST", CHAT_PATH, body=body) as stream:
                if stream.status != 503:
                    return await collect(stream)
            await asyncio.sleep(0.2)


async def test_a_scheduler_that_alone_has_lost_redis_is_replaced(tmp_path: Path) -> None:
    """Running answers go on, new ones are answered while it lives and has its sessions still; then it exits."""
    schedule = chaos_schedule.plan(1, 1.0)
    async with chaos_run.stage(schedule, tmp_path) as stage:
        await chaos_run.crowd(stage.ports, chaos_run.scripted_answers(schedule))
        baseline = await leaks.capture(stage.cluster)

        holders = Holders(stage.cluster.pids)

        async def active() -> str:
            port = await active_scheduler_port(stage.redis)
            # In a thread: all processes reach Redis through a proxy that runs here.
            return "" if port is None else await asyncio.to_thread(holders.of, port)

        old = await eventually(active, bool, within_s=WITHIN_S, what="one is active")
        script = Script(pieces=[f"{number} " for number in range(12)], repeat=60, step_ms=20)
        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(answered(port, script)) for port in stage.ports * 2]
            await eventually(
                stage.cluster.status,
                lambda status: status.live_requests.get("decoding") == len(reading),
                within_s=WITHIN_S,
                what="all decode",
            )
            stage.links.redis.cut(old)
            await eventually(
                active, lambda name: name not in ("", old), within_s=WITHIN_S, what="the other one is active"
            )
            short = counting(3)
            for port in stage.ports:
                body = short.body()
                told = await eventually(
                    lambda port=port, body=body: exchange(port, "POST", CHAT_PATH, body=body),
                    lambda told: told.status != 503,
                    within_s=WITHIN_S,
                    what="an answer by the new one",
                )
                assert short.text() == told.json()["choices"][0]["message"]["content"]
        assert [(script.text(), "stop")] * len(reading) == [
            (task.result().text, task.result().finish_reason) for task in reading
        ]
        await eventually(
            stage.cluster.status,
            lambda status: not status.live_requests and not status.unreleased,
            within_s=WITHIN_S,
            what="the new one knows how they ended",
        )
        stage.links.redis.restore(old)
        await stage.cluster.wait_ready(within_s=WITHIN_S)
        await leaks.assert_no_leaks(stage.cluster, baseline, within_s=WITHIN_S)
