"""`firsttoken up` and `status` as a person meets them: start, stop, dead children, bad settings."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import leaks, ports
from tests.support.cancelling import live, long_decode, wait_for_state
from tests.support.chat import CHAT_PATH, ask, collect, stream_chat
from tests.support.cluster import FIRSTTOKEN, Cluster, ClusterPlan
from tests.support.http_client import exchange
from tests.support.polling import eventually
from tests.support.script import counting

ROLES = ("gateway", "scheduler", "prefill", "decode", "redis")
REQUEST_STATES = {"queued", "placing", "prefilling", "transferring", "decoding", "aborting"}
BLOCK_STATES = {"free", "reserved", "active", "cached", "quarantined"}
SERVICES = ("gateway", "scheduler", "prefill_worker", "decode_worker")
pytestmark = pytest.mark.timeout(600)


async def test_two_workers_a_role() -> None:
    """`--prefill 2 --decode 2`: all four workers take part, every text is exact, nothing is left."""
    with ClusterPlan().scripted().prefill(2).decode(2).start() as cluster:
        await ask(cluster.port, counting(3).body())
        baseline = await leaks.capture(cluster)
        scripts = [counting(30 + i, step_ms=20, prefill_ms=200) for i in range(24)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stream_chat(cluster.port, script.body())) for script in scripts]
        assert [script.text() for script in scripts] == [task.result().text for task in tasks]
        for role in ("prefill", "decode"):
            computed = [m.total("firsttoken_tokens_computed_total") for m in await cluster.role_metrics(role)]
            assert 2 == len(computed)
            assert min(computed) > 0, f"a {role} worker was never used"
        await leaks.assert_no_leaks(cluster, baseline)


async def test_ctrl_c_under_load_drains() -> None:
    """OPS-01: running streams end with their whole text, new requests are refused at once, no process is left, code 0."""
    cluster = ClusterPlan().scripted().launch()
    script = counting(250, step_ms=30)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream_chat(cluster.port, script.body())) for _ in range(5)]
        await wait_for_state(cluster, "decoding", 5)
        cluster.interrupt()
        await eventually(lambda: refusal(cluster), lambda refused: refused, within_s=40.0, what="new requests refused")
        assert not any(task.done() for task in tasks), "the streams had ended before the refusal was seen"
    assert [(script.text(), "stop")] * 5 == [(task.result().text, task.result().finish_reason) for task in tasks]
    assert 0 == await asyncio.to_thread(cluster.process.wait, 40)
    cluster.wait_gone(within_s=40.0)


async def refusal(cluster: Cluster) -> bool:
    """Whether a new request is refused: 503, or no connection any more."""
    try:
        answer = await exchange(cluster.port, "POST", CHAT_PATH, body=counting(1).body())
    except (OSError, EOFError):
        return True
    return answer.status == 503


async def test_a_second_ctrl_c_does_not_wait() -> None:
    """Whoever presses it twice wants it to end now; still no process is left."""
    cluster = ClusterPlan().scripted().setting("drain_timeout_s", 120).launch()
    async with live(cluster, long_decode()) as stream:
        await collect(stream, until_deltas=2)
        cluster.interrupt()
        await eventually(lambda: refusal(cluster), lambda refused: refused, within_s=40.0, what="draining")
        cluster.interrupt()
        await asyncio.to_thread(cluster.process.wait, 40)  # the drain alone lasts two minutes
    cluster.wait_gone(within_s=40.0)


async def test_kill_9_of_up_leaves_no_process() -> None:
    """No handler of ours runs then; the children, Redis too, end all the same."""
    cluster = ClusterPlan().scripted().launch()
    async with live(cluster, long_decode()) as stream:
        await collect(stream, until_deltas=2)
        assert len(cluster.pids()) >= 6
        os.kill(cluster.process.pid, signal.SIGKILL)
        await asyncio.to_thread(cluster.process.wait, 40)
    cluster.wait_gone(within_s=40.0)


async def test_a_dead_child_is_restarted_and_named(cluster: Cluster) -> None:
    """`up` starts a dead child again and says so; the status shows the new process."""
    old = (await cluster.status()).one("prefill")
    os.kill(old.live_pid, signal.SIGKILL)

    new = await eventually(
        cluster.status,
        lambda s: any(w.ready and w.pid != old.pid for w in s.of_role("prefill")),
        within_s=60.0,
        what="a new prefill worker",
    )

    assert 1 == len(new.of_role("prefill"))
    assert any("prefill-0" in line and "again" in line for line in cluster.log_path.read_text().splitlines())
    assert counting(3).text() == (await stream_chat(cluster.port, counting(3).body())).text


async def test_status_as_json_and_for_people(cluster: Cluster) -> None:
    """The document of the issue, every service of every role; the table names the same services.

    Asked again where the scheduler does not answer the gateway within its second.
    """

    async def status(*options: str) -> str:
        command = [FIRSTTOKEN, "status", *options, "--url", cluster.base_url]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True, timeout=90, text=True)
        return done.stdout

    as_json = await eventually(
        lambda: status("--json"),
        lambda shown: [True] * len(ROLES) == [each["ready"] for each in json.loads(shown)["services"]],
        within_s=60.0,
        what="all are ready",
    )
    document = json.loads(as_json)
    ids = [service["id"] for service in document["services"]]
    await eventually(
        status, lambda table: all(each in table for each in ids), within_s=60.0, what=f"the table names {ids}"
    )
    assert {"services", "queue", "requests", "blocks"} <= document.keys()
    assert sorted(ROLES) == sorted(service["role"] for service in document["services"])
    fields = {"role", "id", "pid", "address", "admin_url", "ready"}
    for service in document["services"]:
        assert fields == service.keys()
        assert service["ready"] is True
        assert service["pid"] in cluster.pids()
    assert document["requests"].keys() <= REQUEST_STATES | {"finished", "cancelled", "failed"}
    assert {"prefill", "decode"} == document["blocks"].keys()
    for counts in document["blocks"].values():
        assert BLOCK_STATES >= counts.keys()
        assert counts["free"] > 0


async def test_health_and_metrics_of_every_service(cluster: Cluster) -> None:
    """/healthz, /readyz and /metrics answer on each admin port; the metrics of the issue are there from the start."""
    status = await cluster.status()
    for service in status.services:
        if service.role == "redis":
            continue
        for path in ("/healthz", "/metrics"):
            assert 200 == (await exchange(service.admin_port, "GET", path)).status, f"{service.id} {path}"
        await eventually(  # a gateway gives the scheduler a second to answer
            lambda port=service.admin_port: exchange(port, "GET", "/readyz"),
            lambda answer: answer.status == 200,
            within_s=60.0,
            what=f"{service.id} is ready",
        )
    scheduler = await cluster.metrics(status.one("scheduler"))
    assert REQUEST_STATES <= scheduler.by("firsttoken_requests", "state").keys()
    assert {"finished", "cancelled", "failed"} <= scheduler.by("firsttoken_requests_total", "outcome").keys()
    for role in ("prefill", "decode"):
        worker = await cluster.metrics(status.one(role))
        assert BLOCK_STATES == worker.by("firsttoken_kv_blocks", "state").keys()
        assert worker.all("firsttoken_tokens_computed_total", role=role)


@pytest.mark.parametrize("module", SERVICES)
def test_bad_settings_are_all_named(module: str) -> None:
    """A service with two bad settings ends with code 2 and names both."""
    bad = {"FIRSTTOKEN_PORT": "seventy", "FIRSTTOKEN_DRAIN_TIMEOUT_S": "-1", "FIRSTTOKEN_SCRIPTED": "true"}
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FIRSTTOKEN_")}

    done = subprocess.run(
        [sys.executable, "-m", module], env={**kept, **bad}, capture_output=True, timeout=90, text=True, check=False
    )

    assert 2 == done.returncode, done.stderr
    assert "FIRSTTOKEN_PORT" in done.stderr
    assert "FIRSTTOKEN_DRAIN_TIMEOUT_S" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_named() -> None:
    """`up` on a port in use says which one and what to do, and starts nothing."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports.gateway_port()))
        taken.listen()
        port = taken.getsockname()[1]

        done = subprocess.run(
            [FIRSTTOKEN, "up", "--scripted", "--port", str(port)],
            capture_output=True,
            timeout=90,
            text=True,
            check=False,
        )

    assert done.returncode != 0
    assert str(port) in done.stderr
    assert "Traceback" not in done.stderr


async def test_no_text_in_any_log(cluster: Cluster) -> None:
    """R7: neither question nor answer is in a log; the request's canonical line is, once, with its id."""
    secret = "sesame-4711"
    script = counting(5)
    body = script.body()
    body["messages"].insert(0, {"role": "system", "content": secret})
    record = await stream_chat(cluster.port, body)
    failed = await stream_chat(cluster.port, counting(5, fail_at=3).body())

    async def logs() -> str:
        return "\n".join(path.read_text(errors="replace") for path in log_files(cluster))

    asked = (record.request_id, failed.request_id)
    logged = await eventually(  # a line is written when the scheduler has told the end, after the client's
        logs, lambda text: all(request_id in text for request_id in asked), within_s=60.0, what="both are logged"
    )
    assert secret not in logged
    assert "w1 " not in logged


def log_files(cluster: Cluster) -> list[Path]:
    """What the processes of this system write to: found by their open files, not by a convention."""
    found = {cluster.log_path}
    for pid in cluster.pids():
        for descriptor in ("1", "2"):
            target = Path(f"/proc/{pid}/fd/{descriptor}").resolve()
            if target.is_file():
                found.add(target)
    return sorted(found)
