"""What decode may forget of a resumable answer while its log is behind."""

import pytest

from gateway import answer_log, session
from tests.support.fake_backend import FakeBackend
from tests.support.fake_stream_log import FakeStreamLog
from tests.support.gateway_app import running_gateway, until, until_idle
from tests.support.resuming import ask_resumable, read_on
from tests.support.script import counting

FOR_EVER_S = 3600.0


async def test_what_the_log_lacks_is_kept_by_decode_until_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client goes on reading meanwhile; the acknowledgement follows the log without another token."""
    monkeypatch.setattr(answer_log, "HOLD_S", FOR_EVER_S)
    script, store, backend = counting(40), FakeStreamLog(), FakeBackend()
    backend.max_tokens_out = 10
    async with running_gateway(backend, logs=store.as_real) as running:
        async with ask_resumable(running.port, script) as (stream, read):
            await until(backend.only, lambda request: request.acked == 10)
            store.is_away = True
            backend.let_out(20)
            await read_on(stream, read, max_events=20)
            assert (10, 10) == (backend.only.acked, len(store.only.tokens.ids))
            store.is_away = False
            await until(backend.only, lambda request: request.acked == 20)
            assert 20 == len(store.only.tokens.ids)
            backend.let_out(None)
            await read_on(stream, read)
        await until_idle(running)
    assert (script.text(), "stop") == (read.text, read.finish_reason)


@pytest.mark.parametrize(("hold_s", "num_tokens"), [(0.0, 20), (FOR_EVER_S, 10 + 129)], ids=["time", "tokens"])
async def test_a_log_that_lacks_much_or_for_long_is_not_waited_for(
    hold_s: float, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer does not stand still with its store."""
    monkeypatch.setattr(answer_log, "HOLD_S", hold_s)
    script, store, backend = counting(200), FakeStreamLog(), FakeBackend()
    backend.max_tokens_out = 10
    async with running_gateway(backend, logs=store.as_real) as running:
        async with ask_resumable(running.port, script) as (stream, read):
            await until(backend.only, lambda request: request.acked == 10)
            store.is_away = True
            backend.let_out(num_tokens)
            await until(backend.only, lambda request: request.acked == num_tokens)
            assert 10 == len(store.only.tokens.ids)
            backend.let_out(None)
            await read_on(stream, read)
        await until_idle(running)
    assert (script.text(), "stop") == (read.text, read.finish_reason)


async def test_an_answer_is_over_for_the_scheduler_when_its_log_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has everything, and leaves: until then another reader could still have lost some of it."""
    monkeypatch.setattr(answer_log, "HOLD_S", FOR_EVER_S)
    monkeypatch.setattr(session, "_OUTCOME_WAIT_S", FOR_EVER_S)
    script, store, backend = counting(40), FakeStreamLog(), FakeBackend()
    backend.max_tokens_out = 10
    async with running_gateway(backend, logs=store.as_real) as running:
        async with ask_resumable(running.port, script) as (stream, read):
            await until(backend.only, lambda request: request.acked == 10)
            store.is_away = True
            backend.let_out(None)
            await read_on(stream, read)
        assert (script.text(), "stop") == (read.text, read.finish_reason)
        assert (10, None, 10) == (backend.only.acked, backend.only.outcome, len(store.only.tokens.ids))
        store.is_away = False
        await until_idle(running)
    assert (41, 41, []) == (backend.only.acked, len(store.only.tokens.ids), backend.only.cancel_reasons)
