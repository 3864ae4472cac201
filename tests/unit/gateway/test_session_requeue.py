"""Answers of more than one attempt, over real sockets: the client sees one text."""

import asyncio

from tests.support.chat import CHAT_PATH, ask, collect, stream_chat
from tests.support.fake_backend import STOP, FakeBackend
from tests.support.gateway_app import WAIT_S, running_gateway, the_request, until, until_idle
from tests.support.http_client import open_request
from tests.support.script import Script, counting


async def test_a_preempted_answer_goes_on_behind_what_the_client_has() -> None:
    """No text lost or doubled, half characters included; the usage is the first attempt's; every token is acknowledged."""
    script = Script(pieces=["a", "é".encode()[:1], "é".encode()[1:], *[f"-{i}" for i in range(30)]])
    for num_before in (0, 1, 2, 3, 20):
        backend = FakeBackend()
        backend.cached_tokens, backend.max_tokens_out = 16, num_before
        async with running_gateway(backend) as running, asyncio.TaskGroup() as group:
            body = script.body(stream_options={"include_usage": True})
            asking = group.create_task(stream_chat(running.port, body))
            request = await the_request(running)
            await until(request, lambda seen, n=num_before: seen.attaches and seen.acked >= n)
            await backend.requeue()
            await until(request, lambda seen: seen.attempt == 2 and len(seen.attaches) == 2)
            backend.cached_tokens = 32
            backend.let_out(None)
            record = await asking
            await until_idle(running)

        assert (script.text(), "stop") == (record.text, record.finish_reason)
        assert [num_before] == [len(told.ids) for told in request.deliveries]
        assert [1, num_before + 1] == [attach.from_index for attach in request.attaches]
        assert len(request.tokens) == request.acked
        usage = record.usage or {}
        assert len(request.tokens) == usage["completion_tokens"]
        assert (16 if num_before else 32) == usage["prompt_tokens_details"]["cached_tokens"]


async def test_a_stop_string_may_begin_before_a_preemption_and_end_after_it() -> None:
    """What is held back counts as taken, is delivered, and is not shown when the stop string is complete."""
    script = Script(pieces=["a", "#", "#", "#", *[f"t{i}" for i in range(50)]])
    backend = FakeBackend()
    backend.max_tokens_out = 3
    async with running_gateway(backend) as running, asyncio.TaskGroup() as group:
        asking = group.create_task(stream_chat(running.port, script.body(stop=["###"])))
        request = await the_request(running)
        await until(request, lambda seen: seen.acked == 3)
        await backend.requeue()
        await until(request, lambda seen: len(seen.attaches) == 2)
        backend.let_out(None)
        record = await asking
        await until_idle(running)

    assert ("a", "stop") == (record.text, record.finish_reason)
    assert [3] == [len(told.ids) for told in request.deliveries]
    assert request.finish is not None
    assert (2, 4) == (request.finish.key.attempt, request.finish.index)


async def test_nothing_is_delivered_before_the_client_has_taken_it() -> None:
    """A reader that stands still holds no worker: its request is placed again when it has everything."""
    script = Script(pieces=["x" * 5_000], repeat=800)
    backend = FakeBackend()
    backend.max_tokens_out = 200
    async with running_gateway(backend) as running:
        body = {**script.body(), "stream": True}
        async with open_request(running.port, "POST", CHAT_PATH, body=body, receive_buffer=4096) as stream:
            request = await the_request(running)
            (session,) = running.gateway.sessions.of_request(request.spec.request_id)
            async with asyncio.timeout(WAIT_S):
                while session.usage.completion_tokens < 60:  # 300 KB: more than sockets hold
                    await asyncio.sleep(0.01)
            await backend.requeue()
            await until(request, lambda seen: seen.is_detached)
            assert [] == request.deliveries
            backend.let_out(None)
            record = await collect(stream)
        await until_idle(running)

    (told,) = request.deliveries  # what was on its way to the gateway is made again
    assert [1, len(told.ids) + 1] == [attach.from_index for attach in request.attaches]
    assert (script.text(), "stop") == (record.text, record.finish_reason)


async def test_a_whole_answer_is_delivered_at_once() -> None:
    """What is in the body is taken."""
    script = counting(20)
    backend = FakeBackend()
    backend.max_tokens_out = 7
    async with running_gateway(backend) as running, asyncio.TaskGroup() as group:
        asking = group.create_task(ask(running.port, script.body()))
        request = await the_request(running)
        await until(request, lambda seen: seen.acked == 7)
        await backend.requeue()
        await until(request, lambda seen: len(seen.attaches) == 2)
        backend.let_out(None)
        answer = await asking

    assert script.text() == answer["choices"][0]["message"]["content"]
    assert [7] == [len(told.ids) for told in request.deliveries]


async def test_an_answer_that_is_complete_is_not_asked_for_again() -> None:
    """The worker went before the last acknowledgement: the scheduler is told that the answer has its end."""
    script = counting(20)
    backend = FakeBackend()
    backend.confirms_outcome = True
    backend.keeps_open = True
    async with running_gateway(backend) as running:
        record = await stream_chat(running.port, script.body())
        request = backend.only
        await until(request, lambda seen: seen.acked == len(seen.tokens))
        await backend.requeue()
        await until_idle(running)

    assert script.text() == record.text
    (told,) = request.deliveries
    assert (True, STOP, len(request.tokens)) == (told.complete, told.finish_reason, len(told.ids))


async def test_an_answer_whose_end_token_is_here_has_stopped_though_nobody_said_so() -> None:
    """Its worker was lost before the word of its end, and it has as many tokens as were asked for: it was not cut."""
    script = counting(20)
    backend = FakeBackend()
    backend.keeps_open, backend.tells_end = True, False
    async with running_gateway(backend) as running, asyncio.TaskGroup() as group:
        asking = group.create_task(stream_chat(running.port, script.body(max_tokens=21)))
        request = await the_request(running)
        await until(request, lambda seen: seen.acked == len(seen.tokens) == 21)
        await backend.requeue()
        record = await asking
        await until_idle(running)

    assert (script.text(), "stop") == (record.text, record.finish_reason)
    (told,) = request.deliveries
    assert (True, STOP, 21) == (told.complete, told.finish_reason, len(told.ids))


async def test_delivered_is_said_again_when_its_stream_broke() -> None:
    """The scheduler asks again on the next stream; the answer goes on once."""
    script = counting(20)
    backend = FakeBackend()
    backend.max_tokens_out = 5
    backend.cut_control_on_delivered = True
    async with running_gateway(backend) as running, asyncio.TaskGroup() as group:
        asking = group.create_task(stream_chat(running.port, script.body()))
        request = await the_request(running)
        await until(request, lambda seen: seen.acked == 5)
        await backend.requeue()
        await until(request, lambda seen: len(seen.attaches) == 2)
        backend.let_out(None)
        record = await asking

    assert script.text() == record.text
    assert [5, 5] == [len(told.ids) for told in request.deliveries]
    assert [(0, 0), (1, 5)] == [(start.last_attempt_seen, start.tokens_held) for start in request.starts]


async def test_a_client_that_leaves_while_its_request_is_requeued_cancels() -> None:
    """Nothing is delivered for nobody."""
    backend = FakeBackend()
    backend.max_tokens_out = 5
    async with running_gateway(backend) as running:
        body = {**counting(20).body(), "stream": True}
        async with open_request(running.port, "POST", CHAT_PATH, body=body) as stream:
            await collect(stream, until_deltas=5)
            backend.may_place.clear()
            await backend.requeue()
            request = backend.only
            await until(request, lambda seen: seen.deliveries)
        await until(request, lambda seen: seen.cancel_reasons)
        await until_idle(running)

    assert ["disconnect"] == request.cancel_reasons
    assert 1 == len(request.attaches)
