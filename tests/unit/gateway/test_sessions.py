"""The bound and the drain. Requests themselves are in test_session.py."""

import asyncio

import pytest
from structlog.testing import capture_logs

from gateway.sessions import Sessions
from shared.domain.errors import ErrorCode, ServingError
from tests.support.chat import CHAT_PATH, collect, stream_chat
from tests.support.fake_backend import FakeBackend
from tests.support.gateway_app import running_gateway, until_idle
from tests.support.hand_timers import HandTimers
from tests.support.http_client import exchange, open_request
from tests.support.script import Script, counting


async def test_places_are_counted_and_given_back_once() -> None:
    """A second giving back does nothing."""
    async with asyncio.TaskGroup() as group:
        sessions = Sessions(group, 1)
        leave = sessions.enter()
        with pytest.raises(ServingError) as caught:
            sessions.enter()
        leave()
        leave()
        assert 0 == sessions.num_open
        sessions.enter()
        assert 1 == sessions.num_open

    assert ErrorCode.OVERLOADED == caught.value.code


async def test_several_places_are_taken_all_or_none() -> None:
    """One for each answer; what does not fit takes nothing."""
    async with asyncio.TaskGroup() as group:
        sessions = Sessions(group, 4)
        leave = sessions.enter(3)
        with pytest.raises(ServingError):
            sessions.enter(2)
        assert 3 == sessions.num_open
        sessions.enter()
        leave()
        assert 1 == sessions.num_open


async def test_a_drain_lets_streams_end_and_refuses_new_ones() -> None:
    """OPS-01: all of it, finish reason and [DONE]; new requests get 503 meanwhile; then it returns."""
    script = counting(8)
    backend = FakeBackend()
    backend.max_tokens_out = 2
    async with running_gateway(backend) as running:
        body = {**script.body(), "stream": True}
        async with open_request(running.port, "POST", CHAT_PATH, body=body) as stream, asyncio.TaskGroup() as group:
            record = await collect(stream, until_deltas=2)
            drain = group.create_task(running.gateway.sessions.drain(30.0))
            while not running.gateway.sessions.is_draining:
                await asyncio.sleep(0)
            answer = await exchange(running.port, "POST", CHAT_PATH, body=script.body())
            assert not drain.done()
            backend.let_out(None)
            await collect(stream, record=record)
            async with asyncio.timeout(30):
                await drain

    assert (503, "draining") == (answer.status, answer.json()["error"]["code"])
    assert "retry-after" in answer.headers
    assert (script.text(), "stop") == (record.text, record.finish_reason)


async def test_what_outlives_the_drain_is_cancelled_with_an_error() -> None:
    """The client hears why; the scheduler hears `shutdown`."""
    backend = FakeBackend()
    backend.max_tokens_out = 2
    async with running_gateway(backend) as running:
        body = {**counting(8).body(), "stream": True}
        async with open_request(running.port, "POST", CHAT_PATH, body=body) as stream:
            record = await collect(stream, until_deltas=2)
            await running.gateway.sessions.drain(0.05)
            await collect(stream, record=record)

    assert "draining" == (record.error or {})["code"]
    assert ["shutdown"] == backend.only.cancel_reasons
    assert 0 == running.gateway.sessions.num_open


async def test_the_end_of_a_drain_cancels_nothing_that_its_client_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler is away and confirms nothing: the answer is finished all the same."""
    outcome_wait_s, last_words_s = 2000.0, 3000.0  # over when the test says so
    monkeypatch.setattr("gateway.session._OUTCOME_WAIT_S", outcome_wait_s)
    monkeypatch.setattr("gateway.sessions._LAST_WORDS_S", last_words_s)
    timers = HandTimers(monkeypatch, from_s=outcome_wait_s)
    backend = FakeBackend()
    backend.confirms_outcome = False
    with capture_logs() as logs:
        async with running_gateway(backend) as running, asyncio.TaskGroup() as group:
            record = await stream_chat(running.port, counting(3).body())
            drain = group.create_task(running.gateway.sessions.drain(0.0))
            await timers.until_armed(last_words_s)
            assert 1 == running.gateway.sessions.num_open
            timers.ring(outcome_wait_s)
            async with asyncio.timeout(30):
                await drain

    assert (counting(3).text(), "stop") == (record.text, record.finish_reason)
    assert [] == backend.only.cancel_reasons
    assert ["finished"] == [line["outcome"] for line in logs if line["event"] == "request"]


async def test_a_client_that_has_not_read_its_end_when_the_gateway_goes_was_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its session is broken off after the last words: the log does not call that finished."""
    monkeypatch.setattr("gateway.sessions._LAST_WORDS_S", 0.2)
    backend = FakeBackend()
    script = Script(pieces=["x" * 100_000], repeat=40)  # more than sockets hold
    with capture_logs() as logs:
        async with running_gateway(backend) as running:
            body = {**script.body(), "stream": True}
            async with open_request(running.port, "POST", CHAT_PATH, body=body, receive_buffer=4096):
                (session,) = running.gateway.sessions.of_request(running.backend.only.spec.request_id)
                async with asyncio.timeout(30):
                    while session.usage.completion_tokens < 41:  # its answer is complete here
                        await asyncio.sleep(0.01)
                await running.gateway.sessions.drain(0.0)
                running.gateway.sessions.close()
                await until_idle(running)

    assert ["cancelled"] == [line["outcome"] for line in logs if line["event"] == "request"]
