"""PDX-03: a worker whose KV another cannot read is never paired with it: said once at the start, and no request fails."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from shared.domain.refusals import RefusedKind
from tests.support import leaks
from tests.support.chat import ask
from tests.support.cluster import STOP_TIMEOUT_S, Cluster, ClusterPlan
from tests.support.polling import eventually
from tests.support.script import counting

NUM_REQUESTS = 8
pytestmark = pytest.mark.timeout(900)


@contextmanager
def one_more_decode_worker(cluster: Cluster, like_pid: int, worker_id: str, name: str, value: str) -> Generator[None]:
    """A decode worker beside the one of `up`, as somebody would start it by hand with one setting that is another."""
    environ = dict(
        entry.decode().split("=", 1)
        for entry in Path(f"/proc/{like_pid}/environ").read_bytes().split(b"\0")
        if b"=" in entry
    )
    environ |= {"FIRSTTOKEN_WORKER_ID": worker_id, f"FIRSTTOKEN_{name}": value}
    log = cluster.log_path.parent / f"{worker_id}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "cli.leash", str(os.getpid()), sys.executable, "-P", "-m", "decode_worker"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        finally:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("plan", "unlike"),
    [
        (ClusterPlan().scripted(), {"decode-blocks": ("BLOCK_SIZE", "32")}),
        (ClusterPlan(), {"decode-dtype": ("KV_DTYPE", "float16"), "decode-mode": ("NUMERIC_MODE", "q4a8")}),
    ],
    ids=["block size", "cache and numbers"],
)
async def test_unlike_workers_are_never_paired(plan: ClusterPlan, unlike: Mapping[str, tuple[str, str]]) -> None:
    """Another block size, type of cache or numeric mode: a refusal and a log line for each pair, and right answers."""
    with plan.start() as cluster:
        expected = await answers(cluster, plan)
        baseline = await leaks.capture(cluster)
        like_pid = (await cluster.status()).one("decode").live_pid
        with ExitStack() as stack:
            for worker_id, (name, value) in unlike.items():
                stack.enter_context(one_more_decode_worker(cluster, like_pid, worker_id, name, value))
            await eventually(
                cluster.status,
                lambda status: {each.id for each in status.of_role("decode") if each.ready} == {"decode-0", *unlike},
                within_s=180.0,
                what="the others are there",
            )

            assert expected == await answers(cluster, plan)
            (scheduler,) = await cluster.role_metrics("scheduler")
            # Once a session: a worker that had to dial again is told again.
            assert scheduler.total("firsttoken_refused_total", kind=RefusedKind.UNLIKE_LAYOUT) >= len(unlike)
            assert cluster.log_folder is not None
            log = (cluster.log_folder / "scheduler-0.log").read_text()
            told = [line for line in log.splitlines() if "unlike KV layout" in line]
            assert set(unlike) == {each for each in unlike if any(each in line for line in told)}
            for worker in (await cluster.status()).of_role("decode"):
                computed = (await cluster.metrics(worker)).total("firsttoken_tokens_computed_total")
                assert (worker.id == "decode-0") == (computed > 0)
        await leaks.assert_no_leaks(cluster, baseline)


async def answers(cluster: Cluster, plan: ClusterPlan) -> list[str]:
    """Some at once; each is the same whenever it is asked."""
    if plan.is_scripted:
        bodies: list[dict[str, Any]] = [counting(5 + number).body() for number in range(NUM_REQUESTS)]
    else:
        questions = [[{"role": "user", "content": f"Count to {number}."}] for number in range(NUM_REQUESTS)]
        bodies = [{"model": "default", "messages": each, "max_tokens": 8, "temperature": 0} for each in questions]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(cluster.port, body)) for body in bodies]
    return [task.result()["choices"][0]["message"]["content"] for task in tasks]
