"""Requests whose time is over: what their client hears, and what the scheduler is told."""

import asyncio
from typing import Any

import pytest

from shared.domain.lifecycle import deadline_exceeded
from shared.domain.request import CancelReason
from tests.support.chat import CHAT_PATH, collect
from tests.support.fake_backend import FakeBackend
from tests.support.gateway_app import WAIT_S, running_gateway, the_request, until, until_idle
from tests.support.hand_timers import HandTimers
from tests.support.http_client import exchange, open_request
from tests.support.script import Script, counting

IN_TIME_S = 0.3
ITS_TIME_S = 3000.0  # over when the test says so: the request is at work by then, however slow the machine


async def test_a_whole_answer_that_is_late_is_a_504(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the scheduler does; it hears of the deadline at the start and when it has passed."""
    backend = FakeBackend()
    backend.max_tokens_out = 2
    timers = HandTimers(monkeypatch, from_s=ITS_TIME_S)
    async with running_gateway(backend) as running, asyncio.TaskGroup() as group:
        body = {**counting(8).body(), "timeout": ITS_TIME_S}
        asking = group.create_task(exchange(running.port, "POST", CHAT_PATH, body=body))
        request = await the_request(running)
        await until(request, lambda seen: seen.acked == 2)
        timers.ring(ITS_TIME_S)
        answer = await asking
        await until_idle(running)

    assert (504, "timeout") == (answer.status, answer.json()["error"]["code"])
    assert ["deadline"] == request.cancel_reasons
    assert 0 < request.starts[0].timeout_ms <= ITS_TIME_S * 1000


async def test_a_stream_that_is_late_ends_with_the_error_behind_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the header; no finish reason, then [DONE]."""
    backend = FakeBackend()
    backend.max_tokens_out = 2
    script = counting(8)
    timers = HandTimers(monkeypatch, from_s=ITS_TIME_S)
    async with running_gateway(backend) as running:
        options: dict[str, Any] = {"body": {**script.body(), "stream": True}}
        headers = {"X-Request-Timeout": str(ITS_TIME_S)}
        async with open_request(running.port, "POST", CHAT_PATH, headers=headers, **options) as stream:
            await until(await the_request(running), lambda seen: seen.acked == 2)
            timers.ring(ITS_TIME_S)
            record = await collect(stream)

    assert (200, script.text(2)) == (stream.status, record.text)
    assert ("timeout", None) == ((record.error or {})["code"], record.finish_reason)


async def test_without_admission_a_late_stream_is_a_504_too() -> None:
    """Nothing had been sent yet."""
    backend = FakeBackend()
    backend.may_admit.clear()
    async with running_gateway(backend) as running:
        body = {**counting(8).body(), "stream": True, "timeout": IN_TIME_S}
        answer = await exchange(running.port, "POST", CHAT_PATH, body=body)

    assert (504, "timeout") == (answer.status, answer.json()["error"]["code"])


async def test_without_a_scheduler_nobody_waits_longer() -> None:
    """The gateway has a clock of its own."""
    async with running_gateway(scheduler="127.0.0.1:1") as running:
        body = {**counting(8).body(), "timeout": IN_TIME_S}
        answer = await exchange(running.port, "POST", CHAT_PATH, body=body)
        await until_idle(running)

    assert (504, "timeout") == (answer.status, answer.json()["error"]["code"])


async def test_several_answers_are_late_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One error for all."""
    backend = FakeBackend()
    backend.max_tokens_out = 2
    timers = HandTimers(monkeypatch, from_s=ITS_TIME_S)
    async with running_gateway(backend) as running, asyncio.TaskGroup() as group:
        body = {**counting(8).body(), "n": 2, "timeout": ITS_TIME_S}
        asking = group.create_task(exchange(running.port, "POST", CHAT_PATH, body=body))
        async with asyncio.timeout(WAIT_S):
            while len(backend.requests) < 2:
                await asyncio.sleep(0.001)
        for request in backend.requests.values():
            await until(request, lambda seen: seen.acked == 2)
        timers.ring(ITS_TIME_S)
        answer = await asking
        await until_idle(running)

    assert (504, "timeout") == (answer.status, answer.json()["error"]["code"])
    assert [["deadline"]] * 2 == [request.cancel_reasons for request in backend.requests.values()]


async def test_an_answer_in_time_is_not_touched() -> None:
    """The scheduler hears of the default where the client says nothing."""
    script = counting(8)
    async with running_gateway(default_timeout_s=500) as running:
        answer = await exchange(running.port, "POST", CHAT_PATH, body=script.body())
        request = await the_request(running)
        await until(request, lambda request: request.outcome is not None)

    assert script.text() == answer.json()["choices"][0]["message"]["content"]
    assert 450_000 < request.starts[0].timeout_ms <= 500_000
    assert [] == request.cancel_reasons


@pytest.mark.parametrize("text", ["0", "soon", "1_000"])
async def test_a_header_that_is_no_time_is_a_400(text: str) -> None:
    """Before anything is asked of anyone."""
    backend = FakeBackend()
    async with running_gateway(backend) as running:
        headers = {"X-Request-Timeout": text}
        answer = await exchange(running.port, "POST", CHAT_PATH, headers=headers, body=counting(3).body())

    assert (400, "X-Request-Timeout") == (answer.status, answer.json()["error"]["param"])
    assert {} == backend.requests


async def test_what_is_held_back_comes_before_the_error() -> None:
    """A possible stop string and half a character: the client has the text of every token that came."""
    backend = FakeBackend()
    backend.max_tokens_out = 3
    script = Script(pieces=["a", "#", b"\xe2\x82", "b"])
    async with running_gateway(backend) as running:
        options: dict[str, Any] = {"body": {**script.body(stop=["##"]), "stream": True}}
        async with open_request(running.port, "POST", CHAT_PATH, **options) as stream:
            request = await the_request(running)
            await until(request, lambda request: request.acked == 3)
            (session,) = running.gateway.sessions.of_request(request.spec.request_id)
            session.cancel(CancelReason.DEADLINE, deadline_exceeded())
            record = await collect(stream)

    assert ("a#\ufffd", "timeout") == (record.text, (record.error or {})["code"])
