"""Reading on: who may, from where, and what a cut does, with a fake scheduler and decode worker."""

import asyncio
from dataclasses import replace

import pytest

from gateway.streams import wanted_from
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.lifecycle import deadline_exceeded
from shared.domain.request import CancelReason
from tests.support.fake_backend import FakeBackend
from tests.support.fake_stream_log import FakeStreamLog
from tests.support.gateway_app import WAIT_S, running_gateway, the_request, until, until_idle
from tests.support.hand_timers import HandTimers
from tests.support.http_client import exchange
from tests.support.resuming import STREAMS_PATH, ReadSoFar, ask_resumable, read_on, resume
from tests.support.script import Script, counting


@pytest.mark.parametrize(
    ("headers", "query", "expected"),
    [({}, {}, 0), ({"last-event-id": "7"}, {"from": "3"}, 7), ({}, {"from": "3"}, 3), ({"last-event-id": ""}, {}, 0)],
)
def test_where_a_reader_wants_to_go_on(headers: dict[str, str], query: dict[str, str], expected: int) -> None:
    """A browser repeats its first URL and adds what it has."""
    assert expected == wanted_from(headers, query)


@pytest.mark.parametrize("text", ["-1", "x", "1.5", "\u0663", "9" * 11])
def test_what_is_no_number_is_refused(text: str) -> None:
    """By the name of the field."""
    with pytest.raises(ServingError) as refused:
        wanted_from({"last-event-id": text}, {})
    assert (ErrorCode.INVALID_REQUEST, "from") == (refused.value.code, refused.value.param)


async def test_a_reader_goes_on_where_it_was_cut() -> None:
    """The older session sends nothing more upstream, and the newer names a higher number everywhere."""
    script, store, backend = counting(40), FakeStreamLog(), FakeBackend()
    backend.max_tokens_out = 10
    async with running_gateway(backend, logs=store.as_real) as running:
        async with ask_resumable(running.port, script) as (stream, read):
            await read_on(stream, read, max_events=8)
            await until(backend.only, lambda request: request.acked == 10)
            stream.cut()
        async with resume(running.port, read) as stream:
            await until(backend.only, lambda request: len(request.attaches) == 2)
            backend.let_out(None)
            await read_on(stream, read)
        await until_idle(running)
    assert (script.text(), "stop") == (read.text, read.finish_reason)
    assert [1, 2] == [start.session for start in backend.only.starts]
    assert [(1, 1), (2, 11)] == [(attach.session, attach.from_index) for attach in backend.only.attaches]
    assert [] == backend.only.cancel_reasons
    assert store.only.outcome is not None


async def test_a_reader_has_what_is_left_of_the_time() -> None:
    """And not all of it again: the deadline stays where the first gateway has set it."""
    script, store, backend = counting(40), FakeStreamLog(), FakeBackend()
    backend.max_tokens_out = 5
    async with running_gateway(backend, logs=store.as_real) as running:
        async with ask_resumable(running.port, script, timeout=500) as (stream, read):
            await read_on(stream, read, max_events=4)
            await until(backend.only, lambda request: request.acked == 5)
            stream.cut()
        ((request_id, held),) = store.answers.items()
        earlier = replace(held.head, deadline_unix_ms=held.head.deadline_unix_ms - 400_000)
        store.answers[request_id] = replace(held, head=earlier)
        async with resume(running.port, read) as stream:
            await until(backend.only, lambda request: len(request.starts) == 2)
            backend.let_out(None)
            await read_on(stream, read)
        await until_idle(running)
    first, second = (start.timeout_ms for start in backend.only.starts)
    assert (True, True) == (400_000 < first <= 500_000, 0 < second <= 100_000)
    assert script.text() == read.text


async def test_a_reader_that_comes_when_the_time_is_over_is_told() -> None:
    """Behind the text that the log has, of which it lacks the end; held back text too."""
    script, store, backend = Script(pieces=["a", "b", "c", "#", "d"]), FakeStreamLog(), FakeBackend()
    backend.max_tokens_out = 4
    async with running_gateway(backend, logs=store.as_real) as running:
        async with ask_resumable(running.port, script, stop=["##"]) as (stream, read):
            await read_on(stream, read, max_events=2)
            await until(backend.only, lambda request: request.acked == 4)
            stream.cut()
        ((request_id, held),) = store.answers.items()
        store.answers[request_id] = replace(held, head=replace(held.head, deadline_unix_ms=1))
        async with resume(running.port, read) as stream:
            await read_on(stream, read)
        await until_idle(running)
    assert ("timeout", "abc#", 5) == (read.error, read.text, read.last_id)
    assert store.only.outcome is not None


async def test_tokens_that_only_the_log_has_are_shown_before_an_error() -> None:
    """Broken off between the two."""
    script, store, backend = counting(40), FakeStreamLog(), FakeBackend()
    backend.max_tokens_out = 5
    async with running_gateway(backend, logs=store.as_real) as running:
        async with ask_resumable(running.port, script) as (stream, read):
            await until(backend.only, lambda request: request.acked == 5)
            store.may_answer.clear()
            backend.let_out(6)
            async with asyncio.timeout(WAIT_S):
                while store.num_waiting == 0:
                    await asyncio.sleep(0.01)
            (session,) = running.gateway.sessions.of_request(backend.only.spec.request_id)
            session.cancel(CancelReason.DEADLINE, deadline_exceeded())
            await read_on(stream, read)
        await until_idle(running)
    assert ("timeout", script.text(6)) == (read.error, read.text)
    assert 6 == len(store.only.tokens.ids)


async def test_the_older_reader_is_told() -> None:
    """Its stream ends with the error `superseded`; what may become a stop string is left to the newer one."""
    store, backend = FakeStreamLog(), FakeBackend()
    script = Script(pieces=["a", "b", "#", "##", "c"])
    backend.max_tokens_out = 3
    async with running_gateway(backend, logs=store.as_real) as running:
        async with ask_resumable(running.port, script, stop=["###"]) as (stream, older):
            await until(await the_request(running), lambda request: request.acked == 3)
            newer = ReadSoFar(request_id=older.request_id)
            async with resume(running.port, newer) as resumed:
                await read_on(stream, older)
                backend.let_out(None)
                await read_on(resumed, newer)
        await until_idle(running)
    assert ("superseded", "ab", "ab", "stop") == (older.error, older.text, newer.text, newer.finish_reason)


async def test_nothing_is_acknowledged_while_no_client_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the grace is over; then the end is written, and the scheduler is asked to cancel."""
    store, backend = FakeStreamLog(), FakeBackend()
    backend.max_tokens_out = 10
    grace_s = 3000.0  # over when the test says so
    timers = HandTimers(monkeypatch, from_s=grace_s)
    async with running_gateway(backend, logs=store.as_real, resumable_grace_s=grace_s) as running:
        async with ask_resumable(running.port, counting(40)) as (stream, read):
            await read_on(stream, read, max_events=11)
            await until(backend.only, lambda request: request.acked == 10)
            stream.cut()
        await timers.until_armed(grace_s)  # the session has seen the cut
        backend.let_out(20)
        async with asyncio.timeout(WAIT_S):
            while len(store.only.tokens.ids) < 20:
                await asyncio.sleep(0.01)
        timers.ring(grace_s)
        await until(backend.only, lambda request: request.cancel_reasons)
        await until_idle(running)
    assert (10, ["disconnect"]) == (backend.only.acked, backend.only.cancel_reasons)
    assert store.only.outcome is not None
    assert store.only.outcome.error is not None
    assert (20, ErrorCode.CANCELLED) == (len(store.only.tokens.ids), store.only.outcome.error.code)


async def test_a_stop_string_that_only_the_log_has_is_told_to_decode() -> None:
    """The session before died between writing the last token and saying so."""
    script, store, backend = counting(40), FakeStreamLog(), FakeBackend()
    backend.max_tokens_out = 5
    async with running_gateway(backend, logs=store.as_real) as running:
        async with ask_resumable(running.port, script, stop=["w9"]) as (stream, read):
            await read_on(stream, read, max_events=4)
            await until(backend.only, lambda request: request.acked == 5)  # nothing more of it is on its way to the log
            stream.cut()
        ids = tuple(backend.only.tokens[:10])
        (request_id,) = store.answers
        held = store.answers[request_id]
        store.answers[request_id] = replace(held, tokens=replace(held.tokens, ids=ids))
        async with resume(running.port, read) as stream:
            await read_on(stream, read)
        await until(backend.only, lambda request: request.finish is not None)
        await until_idle(running)
    assert (script.text(9), "stop") == (read.text, read.finish_reason)
    assert backend.only.finish is not None
    assert (10, 2) == (backend.only.finish.index, backend.only.finish.session)


async def test_refusals() -> None:
    """Unknown, another's, no number, the store away; the answer under way is not touched by any of them."""
    store, backend = FakeStreamLog(), FakeBackend()
    backend.max_tokens_out = 3
    async with running_gateway(backend, logs=store.as_real) as running:
        async with ask_resumable(running.port, counting(10)) as (stream, read):
            await read_on(stream, read, max_events=2)
            path = STREAMS_PATH + read.request_id
            statuses = [
                (await exchange(running.port, "GET", path, headers={"Authorization": "Bearer x"})).status,
                (await exchange(running.port, "GET", STREAMS_PATH + "01J0000000000000000000000A")).status,
                (await exchange(running.port, "GET", path + "?from=x")).status,
            ]
            store.is_away = True
            statuses.append((await exchange(running.port, "GET", path)).status)
            backend.let_out(None)
            await read_on(stream, read)
        await until_idle(running)
    assert [404, 404, 400, 503] == statuses
    assert counting(10).text() == read.text


@pytest.mark.parametrize("is_away", [False, True])
async def test_another_key_cancels_nothing(is_away: bool) -> None:
    """As little as it reads on, on both paths; whose it is the scheduler knows, with or without the store."""
    store, backend = FakeStreamLog(), FakeBackend()
    backend.max_tokens_out = 3
    async with running_gateway(backend, logs=store.as_real) as running:
        async with ask_resumable(running.port, counting(10), headers={"Authorization": "Bearer x"}) as (stream, read):
            await until(await the_request(running), lambda request: request.acked == 3)
            store.is_away = is_away
            paths = [STREAMS_PATH + read.request_id, "/v1/requests/" + read.request_id]
            foreign = [(await exchange(running.port, "DELETE", path)).status for path in paths]
            reasons = list(backend.only.cancel_reasons)
            headers = {"Authorization": "Bearer x"}
            own = (await exchange(running.port, "DELETE", paths[0], headers=headers)).status
            await read_on(stream, read)
        await until_idle(running)
    assert ([404, 404], []) == (foreign, reasons)
    assert (200, "cancelled") == (own, read.error)


async def test_without_a_store_nothing_can_be_read_on() -> None:
    """The question is answered as any other."""
    backend = FakeBackend()
    async with running_gateway(backend) as running:
        async with ask_resumable(running.port, counting(5)) as (stream, read):
            await read_on(stream, read)
        answer = await exchange(running.port, "GET", STREAMS_PATH + read.request_id)
    assert (counting(5).text(), 503) == (read.text, answer.status)


async def test_a_gateway_that_shuts_down_lets_go_of_what_can_be_read_on() -> None:
    """Its stream ends without an end, nothing is cancelled, the log stays open."""
    store, backend = FakeStreamLog(), FakeBackend()
    backend.max_tokens_out = 5
    async with running_gateway(backend, logs=store.as_real) as running:
        async with ask_resumable(running.port, counting(40)) as (stream, read):
            await read_on(stream, read, max_events=4)
            async with asyncio.timeout(WAIT_S):
                await running.gateway.sessions.drain(0.0)
            await read_on(stream, read)
        request = await the_request(running)
    assert not read.is_over
    assert ([], None) == (request.cancel_reasons, store.only.outcome)
