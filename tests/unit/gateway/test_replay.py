"""Answers from their log alone: finished, failed, cut short."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.request import Outcome, RequestState
from tests.support.chat import CHAT_PATH
from tests.support.fake_backend import FakeBackend
from tests.support.fake_stream_log import FakeStreamLog
from tests.support.gateway_app import WAIT_S, running_gateway, the_request, until, until_idle
from tests.support.http_client import exchange
from tests.support.resuming import API_PATH, ReadSoFar, ask_resumable, read_on, resume
from tests.support.script import Script

SCRIPT = Script(pieces=["a", b"\xc3", b"\xa4", "#", "b", b"\xe2\x82"])


@pytest.mark.parametrize("path", [CHAT_PATH, API_PATH])
@pytest.mark.parametrize("has_logprobs", [False, True])
async def test_a_finished_answer_is_the_same_again(path: str, has_logprobs: bool) -> None:
    """From every number on, in its own dialect, with its usage; the backend hears nothing."""
    store, backend = FakeStreamLog(), FakeBackend()
    backend.cached_tokens = 3
    wanted: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if has_logprobs else {}
    async with running_gateway(backend, logs=store.as_real) as running:
        async with ask_resumable(running.port, SCRIPT, path=path, stop=["##"], **wanted) as (stream, first):
            await read_on(stream, first)
        for from_index in range(first.last_id + 2):
            again = ReadSoFar(request_id=first.request_id, last_id=from_index)
            async with resume(running.port, again) as stream:
                await read_on(stream, again)
            assert first.text.endswith(again.text)
            assert (first.finish_reason, first.usage) == (again.finish_reason, again.usage)
            assert (from_index == 0) == (again.text == first.text)
        await until_idle(running)
    assert SCRIPT.text() == first.text
    assert 1 == len(backend.only.starts)


@pytest.mark.parametrize("path", [CHAT_PATH, API_PATH])
async def test_a_failed_answer_fails_again(path: str) -> None:
    """With the text that it had, that which was held back too, and its error."""
    store, backend = FakeStreamLog(), FakeBackend()
    backend.max_tokens_out = 4
    async with running_gateway(backend, logs=store.as_real) as running:
        async with ask_resumable(running.port, SCRIPT, path=path, stop=["##"]) as (stream, first):
            await until(await the_request(running), lambda request: request.acked == 4)
            await exchange(running.port, "DELETE", f"/v1/requests/{first.request_id}")
            await read_on(stream, first)
        for from_index in range(first.last_id + 1):
            again = ReadSoFar(request_id=first.request_id, last_id=from_index)
            async with resume(running.port, again) as stream:
                await read_on(stream, again)
            assert ("cancelled", True) == (again.error, first.text.endswith(again.text))
            assert (from_index == 0) == (again.text == first.text)
        await until_idle(running)
    assert ("cancelled", "a\u00e4#", 5) == (first.error, first.text, first.last_id)


async def test_a_reader_that_leaves_ends_a_long_one() -> None:
    """In the midst of far more than the socket takes."""
    store, backend = FakeStreamLog(), FakeBackend()
    script = Script(pieces=["x" * 2000])
    async with running_gateway(backend, logs=store.as_real) as running:
        async with ask_resumable(running.port, script) as (stream, first):
            await read_on(stream, first)
        ((request_id, held),) = store.answers.items()
        ids = held.tokens.ids[:1] * 20_000
        ended = Outcome(state=RequestState.FAILED, error=ServingError(ErrorCode.INTERNAL, "x"))
        store.answers[request_id] = replace(held, tokens=replace(held.tokens, ids=ids), outcome=ended)
        async with resume(running.port, ReadSoFar(request_id=first.request_id)) as stream:
            async with asyncio.timeout(WAIT_S):
                while not running.gateway.sessions.num_streams:
                    await asyncio.sleep(0.01)
            stream.cut()
            await until_idle(running)
