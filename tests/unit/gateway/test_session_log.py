"""What decode may forget of a resumable answer while its log is behind."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from gateway import answer_log, session
from tests.support.fake_backend import FakeBackend
from tests.support.fake_stream_log import FakeStreamLog
from tests.support.gateway_app import running_gateway, until, until_idle
from tests.support.http_client import HttpStream
from tests.support.resuming import ReadSoFar, ask_resumable, read_on
from tests.support.script import Script, counting

FOR_EVER_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind:
    """An answer whose store went away when ten of its tokens were logged, shown and acknowledged."""

    store: FakeStreamLog
    backend: FakeBackend
    stream: HttpStream
    read: ReadSoFar


@asynccontextmanager
async def behind(script: Script) -> AsyncGenerator[Behind]:
    """Afterwards the client leaves, and the gateway becomes idle."""
    store, backend = FakeStreamLog(), FakeBackend()
    backend.max_tokens_out = 10
    async with running_gateway(backend, logs=store.as_real) as running:
        async with ask_resumable(running.port, script) as (stream, read):
            await until(backend.only, lambda request: request.acked == 10)
            store.is_away = True
            yield Behind(store=store, backend=backend, stream=stream, read=read)
        await until_idle(running)


async def test_what_the_log_lacks_is_kept_by_decode_until_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client goes on reading meanwhile; the acknowledgement follows the log without another token."""
    monkeypatch.setattr(answer_log, "HOLD_S", FOR_EVER_S)
    script = counting(40)
    async with behind(script) as late:
        late.backend.let_out(20)
        await read_on(late.stream, late.read, max_events=20)
        assert (10, 10) == (late.backend.only.acked, len(late.store.only.tokens.ids))
        late.store.is_away = False
        await until(late.backend.only, lambda request: request.acked == 20)
        assert 20 == len(late.store.only.tokens.ids)
        late.backend.let_out(None)
        await read_on(late.stream, late.read)
    assert (script.text(), "stop") == (late.read.text, late.read.finish_reason)


@pytest.mark.parametrize(("hold_s", "num_tokens"), [(0.0, 20), (FOR_EVER_S, 10 + 129)], ids=["time", "tokens"])
async def test_a_log_that_lacks_much_or_for_long_is_not_waited_for(
    hold_s: float, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer does not stand still with its store."""
    monkeypatch.setattr(answer_log, "HOLD_S", hold_s)
    script = counting(200)
    async with behind(script) as late:
        late.backend.let_out(num_tokens)
        await until(late.backend.only, lambda request: request.acked == num_tokens)
        assert 10 == len(late.store.only.tokens.ids)
        late.backend.let_out(None)
        await read_on(late.stream, late.read)
    assert (script.text(), "stop") == (late.read.text, late.read.finish_reason)


async def test_an_answer_is_over_for_the_scheduler_when_its_log_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has everything: until then another reader could still have lost some of it."""
    monkeypatch.setattr(answer_log, "HOLD_S", FOR_EVER_S)
    monkeypatch.setattr(session, "_OUTCOME_WAIT_S", FOR_EVER_S)
    script = counting(40)
    async with behind(script) as late:
        late.backend.let_out(None)
        await read_on(late.stream, late.read)
        assert (script.text(), "stop") == (late.read.text, late.read.finish_reason)
        assert (10, None, 10) == (late.backend.only.acked, late.backend.only.outcome, len(late.store.only.tokens.ids))
        late.store.is_away = False
    request = late.backend.only
    assert (41, 41, []) == (request.acked, len(late.store.only.tokens.ids), request.cancel_reasons)
