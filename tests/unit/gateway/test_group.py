"""Several answers to one question over real sockets, with a fake scheduler and decode worker."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from gateway.intake import child_seed
from shared.domain.errors import ErrorCode, ServingError
from tests.support.chat import CHAT_PATH, ask
from tests.support.fake_backend import FakeBackend, FakeRequest
from tests.support.gateway_app import RunningGateway, running_gateway
from tests.support.http_client import HttpStream, exchange, open_request
from tests.support.script import Script, counting

WAIT_S = 90.0  # a hang alone takes longer
USAGE = {"stream_options": {"include_usage": True}}


@dataclass(slots=True)
class GroupRecord:
    """A streamed answer, choice by choice; anything but a comment behind the end is a failure."""

    texts: dict[int, str] = field(default_factory=dict)
    finishes: dict[int, str] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    usages: list[dict[str, Any]] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)
    error: dict[str, Any] | None = None
    num_done: int = 0

    def take(self, data: str) -> None:
        """One event."""
        assert 0 == self.num_done, "an event after [DONE]"
        if data == "[DONE]":
            self.num_done += 1
            return
        chunk = json.loads(data)
        assert self.error is None, "an event between the error and [DONE]"
        if "error" in chunk:
            self.error = chunk["error"]
            return
        self.ids.add(chunk["id"])
        if chunk.get("usage"):
            assert [] == chunk["choices"]
            self.usages.append(chunk["usage"])
            return
        (choice,) = chunk["choices"]
        number = choice["index"]
        assert number not in self.finishes, "a delta after the finish of its choice"
        self.order.append(number)
        self.texts[number] = self.texts.get(number, "") + (choice["delta"].get("content") or "")
        if choice["finish_reason"] is not None:
            self.finishes[number] = choice["finish_reason"]


async def read(stream: HttpStream, *, until_chunks: int | None = None) -> GroupRecord:
    """To the end, or to so many events."""
    record = GroupRecord()
    async for block in stream.blocks():
        if block.data is not None:
            record.take(block.data)
        if until_chunks is not None and len(record.order) >= until_chunks:
            break
    return record


async def stream_answers(port: int, body: dict[str, Any]) -> GroupRecord:
    """Asks for a streamed answer and reads it to its end."""
    async with open_request(port, "POST", CHAT_PATH, body={**body, "stream": True}) as stream:
        assert 200 == stream.status, await stream.read_body()
        return await read(stream)


async def until_all(running: RunningGateway, count: int, is_so: Callable[[FakeRequest], object]) -> list[FakeRequest]:
    """Waits until the backend has so many requests, and it is so for each."""
    async with asyncio.timeout(WAIT_S):
        while True:
            requests = list(running.backend.requests.values())
            waiting = [request for request in requests if not is_so(request)]
            if len(requests) >= count and not waiting:
                return requests
            await (waiting[0].changed.wait() if waiting else asyncio.sleep(0))


async def until_idle(running: RunningGateway) -> None:
    """Waits until the gateway has no open request."""
    async with asyncio.timeout(WAIT_S):
        await running.gateway.sessions.wait_idle()
    assert 0 == running.gateway.sessions.num_open


async def test_streamed_answers_have_numbers_and_one_end() -> None:
    """Each choice has its text and its finish; one id, the prompt counted once, one usage, one [DONE]."""
    script = counting(6)
    backend = FakeBackend()
    backend.cached_tokens = 16
    async with running_gateway(backend) as running:
        record = await stream_answers(running.port, script.body(n=3, **USAGE))
        await until_all(running, 3, lambda request: request.acked == 7)
        await until_idle(running)

    assert dict.fromkeys(range(3), script.text()) == record.texts
    assert dict.fromkeys(range(3), "stop") == record.finishes
    assert [
        {
            "prompt_tokens": script.num_prompt_tokens,
            "completion_tokens": 21,
            "total_tokens": script.num_prompt_tokens + 21,
            "prompt_tokens_details": {"cached_tokens": 16},
        }
    ] == record.usages
    assert (1, 1) == (record.num_done, len(record.ids))


async def test_children_are_requests_of_their_own() -> None:
    """Ids `<id>.k` under the one that the client knows, each with its derived seed, the same prompt and limits."""
    script = counting(2)
    backend = FakeBackend()
    async with running_gateway(backend) as running:
        answer = await exchange(running.port, "POST", CHAT_PATH, body=script.body(n=3, seed=9, temperature=0.5))

    request_id = answer.headers["x-firsttoken-request"]
    specs = {name: request.spec for name, request in backend.requests.items()}
    assert f"chatcmpl-{request_id}" == answer.json()["id"]
    assert {f"{request_id}.{choice}": child_seed(9, choice) for choice in range(3)} == {
        name: spec.sampling.seed for name, spec in specs.items()
    }
    assert 1 == len({(spec.prompt_ids, spec.max_tokens, spec.sampling.temperature) for spec in specs.values()})


async def test_choices_interleave() -> None:
    """What one has does not wait for the others' ends."""
    script = counting(5)
    backend = FakeBackend()
    backend.credit = 1
    async with running_gateway(backend) as running:
        record = await stream_answers(running.port, script.body(n=2))

    assert [script.text()] * 2 == [record.texts[0], record.texts[1]]
    assert record.order != sorted(record.order)
    assert [] == record.usages


async def test_whole_answers_come_in_order() -> None:
    """n choices with their numbers, texts and log probabilities; one usage."""
    script = counting(4)
    async with running_gateway() as running:
        answer = await ask(running.port, script.body(n=3, logprobs=True, top_logprobs=1))
        await until_idle(running)

    assert [(0, script.text()), (1, script.text()), (2, script.text())] == [
        (choice["index"], choice["message"]["content"]) for choice in answer["choices"]
    ]
    assert [["w0 ", "w1 ", "w2 ", "w3 "]] * 3 == [
        [entry["token"] for entry in choice["logprobs"]["content"]] for choice in answer["choices"]
    ]
    assert (script.num_prompt_tokens, 15) == (
        answer["usage"]["prompt_tokens"],
        answer["usage"]["completion_tokens"],
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_is_refused_refuses_all(stream: bool) -> None:
    """All admitted or none: a status before any stream, under the client's own id, and the others are cancelled."""
    backend = FakeBackend()
    backend.refusal = ServingError(ErrorCode.OVERLOADED, "the queue is full", retry_after_s=3)
    backend.failing_suffix = ".1"
    backend.max_tokens_out = 1
    async with running_gateway(backend) as running:
        body = {**counting(3).body(), "stream": stream, "n": 3}
        answer = await exchange(running.port, "POST", CHAT_PATH, body=body)
        await until_idle(running)

    assert (429, "3", "overloaded") == (
        answer.status,
        answer.headers["retry-after"],
        answer.json()["error"]["code"],
    )
    assert 26 == len(answer.headers["x-firsttoken-request"])
    assert [["sibling"]] * len(backend.requests) == [request.cancel_reasons for request in backend.requests.values()]


@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_fails_ends_all(stream: bool) -> None:
    """After the head one error event and [DONE], in a whole answer a status; nothing of the others goes on."""
    backend = FakeBackend()
    backend.failure_after = (3, ServingError(ErrorCode.WORKER_LOST, "a worker was lost"))
    backend.failing_suffix = ".2"
    backend.max_tokens_out = 5
    script = counting(9)
    async with running_gateway(backend) as running:
        if stream:
            record = await stream_answers(running.port, script.body(n=3))
            assert ("worker_lost", 1, {}) == ((record.error or {})["code"], record.num_done, record.finishes)
            assert script.text(3) == record.texts[2]
        else:
            answer = await exchange(running.port, "POST", CHAT_PATH, body=script.body(n=3))
            assert (503, "worker_lost") == (answer.status, answer.json()["error"]["code"])
        await until_idle(running)

    reasons = {name[-2:]: request.cancel_reasons for name, request in backend.requests.items()}
    assert {".0": ["sibling"], ".1": ["sibling"], ".2": []} == reasons


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_all(stream: bool) -> None:
    """CAN-01: each by a message of its own."""
    backend = FakeBackend()
    backend.max_tokens_out = 2
    async with running_gateway(backend) as running:
        body = {**counting(10).body(), "stream": stream, "n": 3}
        content = json.dumps(body).encode()
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        writer.write(b"POST %b HTTP/1.1\r\nHost: x\r\n" % CHAT_PATH.encode())
        writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(content), content))
        await until_all(running, 3, lambda request: request.acked == 2)
        writer.close()
        requests = await until_all(running, 3, lambda request: request.cancel_reasons)
        await until_idle(running)

    assert [["disconnect"]] * 3 == [request.cancel_reasons for request in requests]


async def test_deleting_the_question_ends_all_answers() -> None:
    """By the id that the client knows: released together, and the stream ends with one error."""
    backend = FakeBackend()
    backend.max_tokens_out = 2
    async with running_gateway(backend) as running:
        body = {**counting(10).body(), "stream": True, "n": 3}
        async with open_request(running.port, "POST", CHAT_PATH, body=body) as stream:
            await until_all(running, 3, lambda request: request.acked == 2)
            path = f"/v1/requests/chatcmpl-{stream.headers['x-firsttoken-request']}"
            answer = await exchange(running.port, "DELETE", path)
            record = await read(stream)
        await until_idle(running)

    assert (200, True, 9, "cancelled") == (
        answer.status,
        answer.json()["released"],
        answer.json()["blocks_freed"],
        answer.json()["outcome"],
    )
    assert ("cancelled", 1, {}) == ((record.error or {})["code"], record.num_done, record.finishes)


async def test_a_stalled_client_is_cancelled_with_a_reason() -> None:
    """SCH-02: for all answers; a client that reads on finds the one error."""
    backend = FakeBackend()
    script = Script(pieces=["x" * 2000], repeat=3000)
    async with running_gateway(backend, stall_timeout_s=0.5) as running:
        body = {**script.body(), "stream": True, "n": 2}
        async with open_request(running.port, "POST", CHAT_PATH, body=body, receive_buffer=4096) as stream:
            requests = await until_all(running, 2, lambda request: request.cancel_reasons)
            await until_idle(running)
            record = await read(stream)

    assert [["slow_client"]] * 2 == [request.cancel_reasons for request in requests]
    assert ("slow_client", {}) == ((record.error or {})["code"], record.finishes)
    assert all(script.text().startswith(text) for text in record.texts.values())


async def test_a_slow_client_holds_the_answers_back() -> None:
    """What is not taken by the socket is not acknowledged, for any choice; in time it gets everything."""
    backend = FakeBackend()
    backend.credit = 64
    script = Script(pieces=[f"{digit}" * 4000 for digit in range(10)], repeat=40)
    async with running_gateway(backend) as running:
        body = {**script.body(), "stream": True, "n": 2}
        async with open_request(running.port, "POST", CHAT_PATH, body=body, receive_buffer=262_144) as stream:
            requests = await until_all(running, 2, lambda request: request.num_sent == request.acked + 64)
            num_sent = max(request.num_sent for request in requests)
            record = await read(stream)

    assert num_sent < 400
    assert {0: script.text(), 1: script.text()} == record.texts


async def test_each_answer_takes_a_place() -> None:
    """All or none: 429 before the backend hears of it, and nothing stays taken."""
    backend = FakeBackend()
    async with running_gateway(backend, max_open_requests=2) as running:
        refused = await exchange(running.port, "POST", CHAT_PATH, body=counting(2).body(n=3))
        num_heard = len(backend.requests)
        answer = await ask(running.port, counting(2).body(n=2))
        await until_idle(running)

    assert (429, "overloaded", 0) == (refused.status, refused.json()["error"]["code"], num_heard)
    assert 2 == len(answer["choices"])


async def test_a_drain_ends_all_answers() -> None:
    """OPS-01: what outlives it is cancelled, and the client hears why once."""
    backend = FakeBackend()
    backend.max_tokens_out = 2
    async with running_gateway(backend) as running:
        body = {**counting(8).body(), "stream": True, "n": 2}
        async with open_request(running.port, "POST", CHAT_PATH, body=body) as stream:
            await until_all(running, 2, lambda request: request.acked == 2)
            await running.gateway.sessions.drain(0.05)
            record = await read(stream)

    assert ("draining", 1) == ((record.error or {})["code"], record.num_done)
    assert [["shutdown"]] * 2 == [request.cancel_reasons for request in backend.requests.values()]


async def test_an_error_comes_behind_the_text_of_all() -> None:
    """What was held back of the one that failed and of the others: nobody lacks the text of a token that came."""
    backend = FakeBackend()
    backend.max_tokens_out = 2
    script = Script(pieces=["a", "#", "b"])
    async with running_gateway(backend) as running:
        body = {**script.body(stop=["##"]), "stream": True, "n": 3}
        async with open_request(running.port, "POST", CHAT_PATH, body=body) as stream:
            await until_all(running, 3, lambda request: request.acked == 2)
            await exchange(running.port, "DELETE", f"/v1/requests/{stream.headers['x-firsttoken-request']}")
            record = await read(stream)
        await until_idle(running)

    assert ("cancelled", dict.fromkeys(range(3), "a#")) == ((record.error or {})["code"], record.texts)
