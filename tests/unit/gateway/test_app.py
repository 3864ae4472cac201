"""What the assembled application is, and is not."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.middleware.base import BaseHTTPMiddleware

from gateway.clients.scheduler import ControlStream
from gateway.control import ControlLine
from shared.domain.request import CancelReason
from shared.wire import scheduler_pb2
from tests.support.chat import CHAT_PATH
from tests.support.fake_backend import FakeBackend
from tests.support.gateway_app import running_gateway, the_request, until, until_idle
from tests.support.http_client import exchange
from tests.support.script import counting

PATHS = {
    ("/v1/chat/completions", "POST"),
    ("/api/chat", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{name:path}", "GET"),
    ("/v1/requests/{request_id:path}", "DELETE"),
    ("/v1/streams/{request_id:path}", "DELETE"),
    ("/v1/streams/{request_id:path}", "GET"),
}

NO_TORCH = """
import sys
from pathlib import Path
import gateway.app
from gateway.intake import IntakeReader
from shared.text.chat import ChatTokenizer
model_dir = sys.argv[1]
tokenizer = ChatTokenizer.load(Path(model_dir)) if model_dir else ChatTokenizer.scripted()
content = "What is the capital of France?" if model_dir else '{\\\\"pieces\\\\": [\\\\"a\\\\"]}'
body = '{"model": "m", "messages": [{"role": "user", "content": "%s"}]}' % content
intake = IntakeReader(tokenizer, "m").read_completion(body.encode())
assert len(intake.prompt_ids) > 5
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "numba")))
"""


async def test_there_are_no_other_routes() -> None:
    """No documentation pages, no health on the clients' port."""
    async with running_gateway() as running:
        routes = {
            (getattr(route, "path", ""), method)
            for route in running.gateway.app.routes
            for method in getattr(route, "methods", ())
        }

    assert PATHS == routes


async def test_no_middleware_stands_between_a_client_and_its_answer() -> None:
    """CAN-01: none is added, and of the framework's own none is of the kind that hides a disconnect. Whoever adds one tests
    a disconnect through it.
    """
    async with running_gateway() as running:
        app: Any = running.gateway.app
        layer: object = app.build_middleware_stack()
        kinds: list[type[object]] = []
        while layer is not None:
            kinds.append(type(layer))
            layer = getattr(layer, "app", None)

    assert [] == app.user_middleware
    assert len(kinds) > 1, kinds
    assert not any(issubclass(kind, BaseHTTPMiddleware) for kind in kinds), kinds


@pytest.mark.parametrize("kind", ["stream", "events", "whole"])
async def test_a_disconnect_reaches_the_scheduler(kind: str) -> None:
    """CAN-01: through all that the application is made of; in both stream forms, and before a whole answer."""
    script, backend = counting(5), FakeBackend()
    backend.max_tokens_out = 2
    body = {"message": script.message} if kind == "events" else script.body(stream=kind == "stream")
    path = "/api/chat" if kind == "events" else CHAT_PATH
    async with running_gateway(backend) as running, asyncio.TaskGroup() as group:
        asking = group.create_task(
            exchange(running.port, "POST", path, body=body, headers={"Accept": "text/event-stream"})
        )
        request = await the_request(running)
        await until(request, lambda request: request.num_sent == 2)
        asking.cancel()
        await until(request, lambda request: request.cancel_reasons)
        await until_idle(running)

    assert ["disconnect"] == request.cancel_reasons


async def test_a_client_that_leaves_while_its_start_leaves_cancels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler has the request already: without a word it would compute until a gateway's grace is over."""
    start, ask_cancel = ControlStream.start, ControlLine.ask_cancel
    is_asked, may_go_on = asyncio.Event(), asyncio.Event()

    async def slow_start(self: ControlStream, message: scheduler_pb2.ServeUp) -> None:
        await start(self, message)
        await may_go_on.wait()

    async def noted_ask_cancel(self: ControlLine, reason: CancelReason) -> None:
        is_asked.set()
        await ask_cancel(self, reason)

    monkeypatch.setattr(ControlStream, "start", slow_start)
    monkeypatch.setattr(ControlLine, "ask_cancel", noted_ask_cancel)
    async with running_gateway() as running, asyncio.TaskGroup() as group:
        asking = group.create_task(exchange(running.port, "POST", CHAT_PATH, body=counting(3).body(stream=True)))
        request = await the_request(running)
        asking.cancel()
        async with asyncio.timeout(30):
            await is_asked.wait()
        may_go_on.set()
        await until(request, lambda seen: seen.cancel_reasons)
        await until_idle(running)

    assert ["disconnect"] == request.cancel_reasons


def test_a_real_chat_is_tokenised_without_torch() -> None:
    """In a fresh process; with a prepared model where there is one, since its tokenizer could bring torch along."""
    folders = sorted(Path.home().glob(".firsttoken/models/*/firsttoken.json"))
    model_dir = str(folders[0].parent) if folders else ""

    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, model_dir], check=False, capture_output=True, text=True, timeout=200
    )

    assert (0, "[]\n") == (done.returncode, done.stdout), done.stderr
