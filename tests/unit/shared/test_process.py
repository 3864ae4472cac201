import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping

import httpx
import pytest

from shared.process import Process, RealClock

SERVICE = """
import asyncio, threading
from shared.process import Process, run
from shared.settings import ServiceSettings

async def main(process: Process, config: ServiceSettings) -> None:
    print(process.admin_url, flush=True)
    if config.log_level == "ERROR":
        raise RuntimeError("broken on purpose")
    await process.stopping.wait()
    if config.log_level == "WARNING":
        print("draining", flush=True)
        await asyncio.Event().wait()
    if config.drain_timeout_s == 99:
        never = threading.Event()
        asyncio.get_running_loop().run_in_executor(None, never.wait)
        tasks.append(asyncio.create_task(stay()))
        await asyncio.sleep(0)

async def stay() -> None:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            pass

tasks: list[asyncio.Task[None]] = []
run("scheduler", ServiceSettings, main)
"""


def make_process() -> Process:
    """With the clock of the machine."""
    return Process("decode", "decode-0", RealClock())


async def get(process: Process, path: str, method: str = "GET") -> httpx.Response:
    """One request to the admin server."""
    async with httpx.AsyncClient(timeout=30.0) as client:
        return await client.request(method, process.admin_url + path)


async def test_admin_pages() -> None:
    """Alive from the start, ready when told so, metrics in the text format, own pages as JSON, the rest refused."""
    process = make_process()

    async def status() -> Mapping[str, object]:
        return {"queue": 0}

    async def body() -> None:
        assert 200 == (await get(process, "/healthz")).status_code
        assert (503, {"ready": False, "reason": "starting"}) == await ready(process)
        process.readiness.set(True)
        assert (200, {"ready": True, "reason": ""}) == await ready(process)
        process.metrics.kv_blocks(lambda: {"free": 9})
        metrics = await get(process, "/metrics")
        assert "text/plain; version=0.0.4; charset=utf-8" == metrics.headers["content-type"]
        assert 'firsttoken_kv_blocks{role="decode",state="free",worker="decode-0"} 9.0' in metrics.text
        process.add_admin_route("/status", status)
        assert {"queue": 0} == (await get(process, "/status")).json()
        assert 404 == (await get(process, "/nothing")).status_code
        assert 405 == (await get(process, "/healthz", "POST")).status_code

    await process.serve_admin("127.0.0.1", 0, body)
    with pytest.raises(httpx.ConnectError):
        await get(process, "/healthz")


async def ready(process: Process) -> tuple[int, dict[str, object]]:
    """Status and body of /readyz."""
    answer = await get(process, "/readyz")
    return answer.status_code, answer.json()


async def test_dead_process_is_neither_alive_nor_ready() -> None:
    """When its engine is gone both probes say so, with the reason (OPS-02)."""
    process = make_process()
    process.readiness.set(True)

    async def body() -> None:
        process.set_dead("the engine thread ended")
        health = await get(process, "/healthz")
        assert (503, "the engine thread ended") == (health.status_code, health.json()["reason"])
        assert (503, {"ready": False, "reason": "the engine thread ended"}) == await ready(process)

    await process.serve_admin("127.0.0.1", 0, body)


async def test_readiness_asks_its_probe() -> None:
    """The probe has the last word, and a probe that raises is an error page, not a dead server."""
    process = make_process()
    process.readiness.set(True)
    answers = [(False, "no worker"), (True, "")]

    async def probe() -> tuple[bool, str]:
        return answers.pop(0)

    process.readiness.probe = probe

    async def body() -> None:
        assert (503, {"ready": False, "reason": "no worker"}) == await ready(process)
        assert (200, {"ready": True, "reason": ""}) == await ready(process)
        assert 500 == (await get(process, "/readyz")).status_code
        assert 200 == (await get(process, "/healthz")).status_code

    await process.serve_admin("127.0.0.1", 0, body)


def start_service(**settings: str) -> subprocess.Popen[str]:
    """A real process with the given FIRSTTOKEN_ settings, all of its ports chosen by the kernel."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("FIRSTTOKEN_")}
    environ.update({f"FIRSTTOKEN_{name.upper()}": value for name, value in settings.items()})
    return subprocess.Popen(
        [sys.executable, "-c", SERVICE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    )


def first_line(child: subprocess.Popen[str]) -> str:
    """Waits for what the service prints next."""
    assert child.stdout is not None
    return child.stdout.readline().strip()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_first_signal_drains(number: signal.Signals) -> None:
    """`stopping` is set, main returns, the exit code is 0; the log is JSON all along."""
    with start_service() as child:
        assert (await asyncio.to_thread(first_line, child)).startswith("http://127.0.0.1:")
        child.send_signal(number)
        _, errors = await asyncio.to_thread(child.communicate, timeout=90)

    assert 0 == child.returncode
    assert ["starting", "admin pages", "stopping", "stopped"] == [
        json.loads(line)["event"] for line in errors.splitlines()
    ]


async def test_second_signal_ends_at_once() -> None:
    """A drain that takes too long can be cut, with exit code 1."""
    with start_service(log_level="WARNING") as child:
        await asyncio.to_thread(first_line, child)
        child.send_signal(signal.SIGTERM)
        assert "draining" == await asyncio.to_thread(first_line, child)
        child.send_signal(signal.SIGTERM)
        await asyncio.to_thread(child.communicate, timeout=90)

    assert 1 == child.returncode


async def test_what_is_left_behind_does_not_hold_the_exit() -> None:
    """A task that takes no cancel, and a thread that never ends: both would be bugs, and neither is waited for."""
    with start_service(drain_timeout_s="99") as child:
        await asyncio.to_thread(first_line, child)
        child.send_signal(signal.SIGTERM)
        await asyncio.to_thread(child.communicate, timeout=90)

    assert 0 == child.returncode


async def test_failure_is_logged_and_exits_1() -> None:
    """Whatever main raises ends in one log line with its traceback."""
    with start_service(log_level="ERROR") as child:
        _, errors = await asyncio.to_thread(child.communicate, timeout=90)

    *_, line = [json.loads(text) for text in errors.splitlines()]
    assert (1, "process failed") == (child.returncode, line["event"])
    assert "broken on purpose" in line["exception"]


async def test_bad_settings_exit_2() -> None:
    """All of them are listed before anything starts."""
    with start_service(port="x", log_level="loud") as child:
        output, errors = await asyncio.to_thread(child.communicate, timeout=90)

    assert (2, "") == (child.returncode, output)
    assert ["FIRSTTOKEN_PORT", "FIRSTTOKEN_LOG_LEVEL"] == [line.partition(":")[0] for line in errors.splitlines()]
