"""Whole requests over real sockets: a client, the gateway, a fake scheduler and decode worker."""

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from gateway.answer import MAX_FRAMES, Frame, Head
from gateway.clients.scheduler import Queued
from gateway.clients.tokens import SequenceEnded, TokensArrived
from gateway.intake import IntakeReader
from gateway.journal import Journal
from gateway.request_id import new_identity
from gateway.served_form import ServedForm
from gateway.services import Resumption, Services
from gateway.session import Session
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, TokenId
from shared.domain.logged import LoggedTokens, LogHead
from shared.domain.request import CancelReason, FinishReason, Outcome, RequestState
from shared.obs.metrics import Metrics
from shared.process import RealClock
from shared.state.stream_log import LoggedAnswer
from shared.text.chat import ChatTokenizer
from shared.text.script import SCRIPTED_EOS_ID
from tests.support.chat import CHAT_PATH, ask, collect, stream_chat
from tests.support.fake_backend import STOP, FakeBackend
from tests.support.fake_stream_log import FakeStreamLog
from tests.support.gateway_app import WAIT_S, running_gateway, the_request, until, until_idle
from tests.support.hand_timers import HandTimers
from tests.support.http_client import exchange, open_request
from tests.support.script import Script, counting
from tests.support.session_by_hand import PLACED, ByHand
from tests.support.sse_lines import Block


async def test_a_stream_has_the_text_and_is_acknowledged_to_the_end() -> None:
    """Every token's text in order, the usage, and decode hears that the socket has everything."""
    script = counting(50)
    backend = FakeBackend()
    backend.credit = 7
    async with running_gateway(backend) as running:
        record = await stream_chat(running.port, script.body(stream_options={"include_usage": True}))
        await until(backend.only, lambda request: request.acked == 51)
        await until_idle(running)

    assert script.text() == record.text
    assert "stop" == record.finish_reason
    assert {
        "prompt_tokens": script.num_prompt_tokens,
        "completion_tokens": 51,
        "total_tokens": 51 + len(script.message),
    } == {name: count for name, count in (record.usage or {}).items() if name != "prompt_tokens_details"}


async def test_a_whole_answer_has_the_text_and_what_was_cached() -> None:
    """One JSON object; tokens count as taken when they are in the body."""
    script = counting(20)
    backend = FakeBackend()
    backend.credit, backend.cached_tokens = 3, 16
    async with running_gateway(backend) as running:
        answer = await ask(running.port, script.body())
        await until(backend.only, lambda request: request.acked == 21)
        await until_idle(running)

    assert script.text() == answer["choices"][0]["message"]["content"]
    assert 16 == answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_an_answer_cut_by_max_tokens_says_length() -> None:
    """And counts exactly that many."""
    script = counting(20)
    async with running_gateway() as running:
        answer = await ask(running.port, script.body(max_tokens=5))

    assert ("length", 5) == (answer["choices"][0]["finish_reason"], answer["usage"]["completion_tokens"])
    assert script.text(5) == answer["choices"][0]["message"]["content"]


async def test_a_stop_string_ends_decode_early() -> None:
    """TXT-06: text before it only, `stop`, the count up to the token that completed it, and the worker is told."""
    script = Script(pieces=["a", "#", "##", *[f"t{i}" for i in range(500)]])
    backend = FakeBackend()
    backend.credit = 4
    async with running_gateway(backend) as running:
        record = await stream_chat(running.port, script.body(stop=["###"], stream_options={"include_usage": True}))
        await until(backend.only, lambda request: request.finish is not None)
        await until_idle(running)

    assert ("a", "stop") == (record.text, record.finish_reason)
    assert 3 == (record.usage or {})["completion_tokens"]
    assert backend.only.spec.has_stop_strings
    assert backend.only.finish is not None
    assert (3, STOP) == (backend.only.finish.index, backend.only.finish.reason)
    assert backend.only.num_sent <= 3 + 5


async def test_headers_leave_at_admission() -> None:
    """R11: before any token, with a comment; nothing compresses them, whatever the client accepts."""
    backend = FakeBackend()
    backend.may_place.clear()
    headers = {"Accept-Encoding": "gzip, br, zstd", "X-Request-Id": "mine"}
    async with running_gateway(backend) as running:
        body = {**counting(2).body(), "stream": True}
        async with open_request(running.port, "POST", CHAT_PATH, body=body, headers=headers) as stream:
            first = await anext(stream.blocks())
            backend.may_place.set()
            record = await collect(stream)

    assert "text/event-stream; charset=utf-8" == stream.headers["content-type"]
    assert "no-cache, no-transform" == stream.headers["cache-control"]
    assert "no" == stream.headers["x-accel-buffering"]
    assert "content-encoding" not in stream.headers
    assert ("mine", backend.only.spec.request_id) == (
        stream.headers["x-request-id"],
        stream.headers["x-firsttoken-request"],
    )
    assert (": queued 0",) == first.lines
    assert counting(2).text() == record.text


async def test_a_waiting_stream_is_kept_alive_by_comments() -> None:
    """SSE-02: and by nothing else: no id, event or retry line."""
    backend = FakeBackend()
    backend.max_tokens_out = 1
    async with running_gateway(backend, keep_alive_s=0.2) as running:
        body = {**counting(3).body(), "stream": True}
        async with open_request(running.port, "POST", CHAT_PATH, body=body) as stream:
            seen: list[Block] = []
            blocks = stream.blocks()
            # One may come before the text, where that takes long; behind it there is nothing else.
            while [True, True] != [block.data is None for block in seen[-2:]] or "w0 " not in str(seen):
                seen.append(await anext(blocks))

    comments = [block.lines for block in seen if block.data is None]
    assert [(": queued 0",), *[(": keep-alive",)] * (len(comments) - 1)] == comments
    assert {"", "data"} == {name for block in seen for name, _ in block.fields}


async def test_named_events_over_http() -> None:
    """R10: /api/chat with a single message."""
    script = counting(3)
    async with (
        running_gateway() as running,
        open_request(
            running.port,
            "POST",
            "/api/chat",
            body={"message": script.message, "max_tokens": 10},
            headers={"Accept": "text/event-stream"},
        ) as stream,
    ):
        blocks = [block async for block in stream.blocks() if block.data is not None]

    assert ["delta"] * 3 + ["done"] == [block.event for block in blocks]
    assert script.text() == "".join(json.loads(block.data or "")["delta"] for block in blocks[:3])
    done = json.loads(blocks[-1].data or "")
    assert ("stop", 4, stream.headers["x-firsttoken-request"]) == (
        done["finish_reason"],
        done["usage"]["completion_tokens"],
        done["request_id"],
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refused_admission_is_a_status(stream: bool) -> None:
    """R12: before the start a status and a body, for a stream too."""
    backend = FakeBackend()
    backend.refusal = ServingError(ErrorCode.OVERLOADED, "the queue is full", retry_after_s=3)
    async with running_gateway(backend) as running:
        answer = await exchange(running.port, "POST", CHAT_PATH, body={**counting(2).body(), "stream": stream})
        await until_idle(running)

    assert (429, "3") == (answer.status, answer.headers["retry-after"])
    assert "overloaded" == answer.json()["error"]["code"]
    assert "application/json" == answer.headers["content-type"]


async def test_a_failure_after_the_start_is_in_the_stream() -> None:
    """ERR-01: the text so far, one error event, no finish reason, then [DONE]."""
    backend = FakeBackend()
    backend.failure_after = (3, ServingError(ErrorCode.WORKER_LOST, "a worker was lost"))
    script = counting(10)
    async with running_gateway(backend) as running:
        record = await stream_chat(running.port, script.body())
        await until_idle(running)

    assert script.text(3) == record.text
    assert ("worker_lost", "a worker was lost") == ((record.error or {})["code"], (record.error or {})["message"])


async def test_a_failure_of_a_whole_answer_is_a_status() -> None:
    """Nothing was sent yet, so nothing of the half answer is."""
    backend = FakeBackend()
    backend.failure_after = (3, ServingError(ErrorCode.WORKER_LOST, "a worker was lost"))
    async with running_gateway(backend) as running:
        answer = await exchange(running.port, "POST", CHAT_PATH, body=counting(10).body())

    assert (503, "worker_lost") == (answer.status, answer.json()["error"]["code"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_reset", [False, True])
async def test_a_client_that_leaves_cancels_at_once(stream: bool, is_reset: bool) -> None:
    """CAN-01: by a message on the control stream, for whole answers as well, however the connection ends."""
    backend = FakeBackend()
    backend.max_tokens_out = 2
    async with running_gateway(backend) as running:
        body = {**counting(10).body(), "stream": stream}
        content = json.dumps(body).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\n" % CHAT_PATH.encode())
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
        request = await the_request(running)
        await until(request, lambda seen: seen.acked == 2)
        if is_reset:
            writer.transport.abort()
        writer.close()
        await until(request, lambda seen: seen.cancel_reasons)
        await until_idle(running)

    assert ["disconnect"] == request.cancel_reasons


async def test_a_client_that_leaves_while_it_is_queued_cancels() -> None:
    """Before anything was placed."""
    backend = FakeBackend()
    backend.may_place.clear()
    async with running_gateway(backend) as running:
        body = {**counting(3).body(), "stream": True}
        async with open_request(running.port, "POST", CHAT_PATH, body=body) as stream:
            await anext(stream.blocks())
        request = await the_request(running)
        await until(request, lambda seen: seen.cancel_reasons)
        await until_idle(running)

    assert ["disconnect"] == request.cancel_reasons


async def test_a_request_cancelled_by_its_id_ends_with_an_error() -> None:
    """DELETE ends the stream of whoever is reading it."""
    backend = FakeBackend()
    backend.max_tokens_out = 2
    async with running_gateway(backend) as running:
        body = {**counting(10).body(), "stream": True}
        async with open_request(running.port, "POST", CHAT_PATH, body=body) as stream:
            record = await collect(stream, until_deltas=2)
            answer = await exchange(running.port, "DELETE", f"/v1/requests/chatcmpl-{record.request_id}")
            await collect(stream, record=record)

    assert (200, True, 3, "cancelled") == (
        answer.status,
        answer.json()["released"],
        answer.json()["blocks_freed"],
        answer.json()["outcome"],
    )
    assert "cancelled" == (record.error or {})["code"]


async def test_a_broken_token_stream_is_dialled_again_without_loss() -> None:
    """From the first token that is still wanted; nothing twice, nothing missing."""
    backend = FakeBackend()
    backend.cut_streams_after = 5
    script = counting(30)
    async with running_gateway(backend) as running:
        record = await stream_chat(running.port, script.body())

    assert script.text() == record.text
    assert 2 == backend.num_token_calls
    assert [1, 6] == [attach.from_index for attach in backend.only.attaches]


async def test_a_session_waits_for_the_outcome_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client has its answer at once; a scheduler that never confirms holds up nobody for long."""
    monkeypatch.setattr("gateway.session._OUTCOME_WAIT_S", 0.2)
    backend = FakeBackend()
    backend.confirms_outcome = False
    async with running_gateway(backend) as running:
        record = await stream_chat(running.port, counting(3).body())
        await until_idle(running)

    assert counting(3).text() == record.text


async def test_without_a_scheduler_a_request_waits_and_gets_503(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any header; the bound is the admission wait."""
    monkeypatch.setattr("gateway.control.ADMISSION_WAIT_S", 0.5)
    async with running_gateway(scheduler="127.0.0.1:9") as running:
        answer = await exchange(running.port, "POST", CHAT_PATH, body={**counting(2).body(), "stream": True})
        await until_idle(running)

    assert (503, "no_capacity") == (answer.status, answer.json()["error"]["code"])
    assert "retry-after" in answer.headers


async def test_without_max_tokens_the_largest_pool_is_the_bound() -> None:
    """What is left of it beside the prompt."""
    script = counting(3)
    backend = FakeBackend()
    backend.max_request_tokens = script.num_prompt_tokens + 40
    async with running_gateway(backend) as running:
        await ask(running.port, {"model": "default", "messages": [{"role": "user", "content": script.message}]})

    assert 40 == backend.only.spec.max_tokens


async def test_a_character_that_was_cut_is_shown_once() -> None:
    """At the very end, and in the same chunk order as any text."""
    script = Script(pieces=["a", "é".encode()[:1]])
    async with running_gateway() as running:
        record = await stream_chat(running.port, script.body())

    assert "a\ufffd" == record.text


async def test_a_stalled_client_is_cancelled_with_a_reason() -> None:
    """SCH-02: no byte taken for the stall time while text waits; a client that reads on finds the error."""
    backend = FakeBackend()
    script = Script(pieces=["x" * 2000], repeat=3000)
    async with running_gateway(backend, stall_timeout_s=0.5) as running:
        body = {**script.body(), "stream": True}
        async with open_request(running.port, "POST", CHAT_PATH, body=body, receive_buffer=4096) as stream:
            request = await the_request(running)
            await until(request, lambda seen: seen.cancel_reasons)
            await until_idle(running)
            num_acked = request.acked
            record = await collect(stream)

    assert ["slow_client"] == request.cancel_reasons
    assert "slow_client" == (record.error or {})["code"]
    assert num_acked * 2000 < 1024 * 1024
    assert script.text().startswith(record.text)


async def test_a_slow_client_that_reads_in_time_gets_everything() -> None:
    """SCH-02: backpressure reaches decode through the acknowledgements, and nothing is lost."""
    backend = FakeBackend()
    backend.credit = 64
    script = Script(pieces=[f"{digit}" * 4000 for digit in range(10)], repeat=40)
    async with running_gateway(backend) as running:
        body = {**script.body(), "stream": True}
        async with open_request(running.port, "POST", CHAT_PATH, body=body, receive_buffer=262_144) as stream:
            request = await the_request(running)
            await until(request, lambda seen: seen.num_sent == seen.acked + 64)
            num_sent = request.num_sent
            record = await collect(stream)

    assert num_sent < 400
    assert script.text() == record.text


@pytest.mark.parametrize("stream", [False, True])
async def test_an_end_and_a_break_in_one_pass_make_one_answer(stream: bool) -> None:
    """The last tokens have come and a cancel comes before they are handled: the client gets the error, once, and no more.

    The stream's channel is full, so that its end would have to wait: a cancel during that would have lost it.
    """
    script = counting(200)
    hand, clock, metrics = ByHand(), RealClock(), Metrics("gateway", "gateway-test")
    services = SimpleNamespace(clock=clock, scheduler=hand, tokens=hand, served_model_name="scripted")
    intake = IntakeReader(ChatTokenizer.scripted(), "scripted").read_completion(
        json.dumps({**script.body(), "stream": stream}).encode()
    )
    identity = new_identity({}, clock.unix_ms())
    session = Session(cast("Services", services), intake, identity, Journal(clock, metrics, identity, CHAT_PATH))
    ids = [TokenId(256 + number) for number in range(200)]
    hand.control.try_put(Queued(position=0))
    hand.control.try_put(PLACED)
    items: list[Head | Frame] = []
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        task = group.create_task(session.run())
        for number in range(MAX_FRAMES - 2 if stream else 1):  # the head and the first comment are there
            await hand.tokens.put(TokensArrived(ids=(ids[number],), cached_tokens=0))
            while hand.num_taken <= number:
                await asyncio.sleep(0)
        hand.tokens.try_put(SequenceEnded(index=hand.num_taken, reason=FinishReason.STOP))
        session.cancel(CancelReason.DELETE, ServingError(ErrorCode.CANCELLED, "cancelled"))
        while not session.link.out.is_closed or len(session.link.out):
            items += [await session.link.out.get()] if len(session.link.out) else []
            await asyncio.sleep(0)
        session.link.is_over.set()
        await task
    metrics.close()

    assert [200 if stream else 410] == [item.status for item in items if isinstance(item, Head)]
    body = b"".join(item.data for item in items if isinstance(item, Frame))
    assert 1 == body.count(b'"error"')
    assert 0 == body.count(b'"finish_reason": "stop"')
    assert stream == body.endswith(b"data: [DONE]\n\n")


async def test_tokens_that_come_behind_the_word_of_a_failure_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The word comes by the scheduler, they come from the worker: what was computed before it is waited for a moment."""
    wait_s = 3000.0  # over when the test says so
    monkeypatch.setattr("gateway.session._LAST_TOKENS_S", wait_s)
    timers = HandTimers(monkeypatch, from_s=wait_s)
    hand, clock, metrics = ByHand(), RealClock(), Metrics("gateway", "gateway-test")
    services = SimpleNamespace(clock=clock, scheduler=hand, tokens=hand, served_model_name="scripted")
    intake = IntakeReader(ChatTokenizer.scripted(), "scripted").read_completion(
        json.dumps(counting(9).body(stream=True)).encode()
    )
    identity = new_identity({}, clock.unix_ms())
    session = Session(cast("Services", services), intake, identity, Journal(clock, metrics, identity, CHAT_PATH))
    lost = Outcome(state=RequestState.FAILED, error=ServingError(ErrorCode.WORKER_LOST, "a worker was lost"))
    frames: list[bytes] = []
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        task = group.create_task(session.run())
        for event in (Queued(position=0), PLACED):
            hand.control.try_put(event)
        for number in range(3):
            await hand.tokens.put(TokensArrived(ids=(TokenId(256 + number),), cached_tokens=0))
            while session.usage.completion_tokens <= number:
                await asyncio.sleep(0)
            if number == 0:
                hand.control.try_put(lost)
                await timers.until_armed(wait_s)
        timers.ring(wait_s)
        while not session.link.out.is_closed or len(session.link.out):
            item = await session.link.out.get() if len(session.link.out) else None
            frames += [item.data] if isinstance(item, Frame) else []
            await asyncio.sleep(0)
        session.link.is_over.set()
        await task
    metrics.close()

    said = b"".join(frames)
    places = [said.index(words) for words in (b"w0 ", b"w1 ", b"w2 ", b"worker_lost")]
    assert sorted(places) == places


async def test_an_end_that_comes_before_the_log_is_shown_waits_for_it() -> None:
    """The scheduler has the outcome at once, a slow reader has a long log before it: nothing is taken for lost."""
    num_logged = 2 * MAX_FRAMES * 64  # twice what is put before anybody reads
    hand, clock, metrics = ByHand(), RealClock(), Metrics("gateway", "gateway-test")
    services = SimpleNamespace(
        clock=clock,
        scheduler=hand,
        tokens=hand,
        served_model_name="scripted",
        logs=FakeStreamLog().as_real,
        resumable_grace_s=30.0,
    )
    body = {**Script(pieces=["x"]).body(max_tokens=None), "stream": True, "resumable": True}
    intake = IntakeReader(ChatTokenizer.scripted(), "scripted").read_completion(json.dumps(body).encode())
    identity = new_identity({}, clock.unix_ms())
    head = LogHead(spec=intake.spec(identity.request_id, 0), key_hash="", served=ServedForm.of(intake, 1).to_bytes())
    ids = (*[TokenId(ord("x"))] * num_logged, SCRIPTED_EOS_ID)
    tokens = LoggedTokens(first_index=1, ids=ids, attempt=Attempt(1))
    logged = LoggedAnswer(session=2, head=head, tokens=tokens, outcome=None)
    session = Session(
        cast("Services", services),
        replace(intake, max_tokens=head.spec.max_tokens),
        identity,
        Journal(clock, metrics, identity, CHAT_PATH),
        resumption=Resumption(logged=logged, from_index=0),
    )
    hand.control.try_put(Outcome(state=RequestState.FINISHED, finish_reason=FinishReason.STOP))
    items: list[Head | Frame] = []
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        task = group.create_task(session.run())
        while len(hand.control) or len(session.link.out) < MAX_FRAMES:
            await asyncio.sleep(0)
        for _ in range(10):  # what the outcome sets off
            await asyncio.sleep(0)
        while not session.link.out.is_closed or len(session.link.out):
            items += [await session.link.out.get()] if len(session.link.out) else []
            await asyncio.sleep(0)
        session.link.is_over.set()
        await task
    metrics.close()

    said = b"".join(item.data for item in items if isinstance(item, Frame))
    assert (num_logged, 0, 1) == (
        said.count(b'"content": "x"'), said.count(b'"error"'), said.count(b'"finish_reason": "stop"')
    )  # fmt: skip
