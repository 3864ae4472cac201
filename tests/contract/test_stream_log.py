"""The log of a resumable answer, on a real store."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, RequestId, TokenId
from shared.domain.logged import LoggedTokens, LogHead
from shared.domain.request import FinishReason, Outcome, RequestSpec, RequestState
from shared.domain.sampling import SamplingParams, TokenLogprobs
from shared.state.client import StateClient
from shared.state.keys import ENDED_LOG_TTL_MS, LIVE_LOG_TTL_MS, log_key
from shared.state.stream_log import LogMissing, StreamLog
from tests.support.redis_server import CALL_S, RedisServer

A_MINUTE_MS = 60_000  # since a write, on the slowest machine
REQUEST_ID = RequestId("01J0000000000000000000000A")
UNKNOWN_ID = RequestId("01J0000000000000000000000B")
HEAD = LogHead(
    spec=RequestSpec(
        request_id=REQUEST_ID,
        prompt_ids=(TokenId(5), TokenId(70_000)),
        max_tokens=9,
        sampling=SamplingParams(seed=2**64 - 1, temperature=0.1),
        has_stop_strings=True,
    ),
    key_hash="aa",
    deadline_unix_ms=1_800_000_000_123,
    served=b'{"form": "chunks"}',
)
FINISHED = Outcome(state=RequestState.FINISHED, finish_reason=FinishReason.STOP)
FAILED = Outcome(state=RequestState.FAILED, error=ServingError(ErrorCode.WORKER_LOST, "gone"))

WRITES: list[Callable[[StreamLog], Awaitable[None]]] = [
    lambda log: log.append(REQUEST_ID, 1, tokens(2, 2)),
    lambda log: log.end(REQUEST_ID, 1, 1, FINISHED),
    lambda log: log.write(HEAD, 1, tokens(1, 2)),
]


def tokens(first: int, last: int, attempt: int = 1) -> LoggedTokens:
    """Each with its number as its id and a log probability."""
    numbers = range(first, last + 1)
    return LoggedTokens(
        first_index=first,
        ids=tuple(map(TokenId, numbers)),
        logprobs=tuple(TokenLogprobs(logprob=-float(number), top=((TokenId(number), -0.5),)) for number in numbers),
        attempt=Attempt(attempt),
        cached_tokens=16 if first == 1 else 0,
    )


async def refused(call: Awaitable[None]) -> ErrorCode:
    """The code with which a write is refused."""
    with pytest.raises(ServingError) as error:
        await call
    return error.value.code


async def test_what_was_written_is_what_a_reader_takes_over(client: StateClient) -> None:
    """Question, tokens with their log probabilities, the last attempt; each reader's number is one higher."""
    log = StreamLog(client)
    await log.write(HEAD, 1, tokens(1, 0))
    first = await log.take_over(REQUEST_ID, "aa")
    assert first is not None
    assert (2, HEAD, (), None) == (first.session, first.head, first.tokens.ids, first.outcome)
    await log.append(REQUEST_ID, 2, tokens(1, 3))
    await log.append(REQUEST_ID, 2, tokens(4, 4, attempt=2))
    second = await log.take_over(REQUEST_ID, "aa")
    assert second is not None
    assert (3, HEAD, None) == (second.session, second.head, second.outcome)
    assert replace(tokens(1, 4), attempt=Attempt(2)) == second.tokens


async def test_an_ended_answer_is_read_and_not_taken_over(client: StateClient) -> None:
    """By any number of readers; the first end stands."""
    log = StreamLog(client)
    await log.write(HEAD, 1, tokens(1, 2))
    await log.end(REQUEST_ID, 1, 2, FINISHED)
    await log.end(REQUEST_ID, 1, 2, FAILED)
    for _ in range(2):
        read = await log.take_over(REQUEST_ID, "aa")
        assert read is not None
        assert (0, tokens(1, 2), FINISHED) == (read.session, read.tokens, read.outcome)
    with pytest.raises(LogMissing):
        await log.append(REQUEST_ID, 1, tokens(3, 3))


async def test_an_error_is_an_end_too(client: StateClient) -> None:
    """With its code."""
    log = StreamLog(client)
    await log.write(HEAD, 1, tokens(1, 0))
    await log.end(REQUEST_ID, 1, 0, FAILED)
    read = await log.take_over(REQUEST_ID, "aa")
    assert read is not None
    assert FAILED == read.outcome


async def test_another_key_finds_nothing_and_takes_nothing(client: StateClient) -> None:
    """Neither does an unknown request; the writer goes on."""
    log = StreamLog(client)
    await log.write(HEAD, 1, tokens(1, 1))
    assert None is await log.take_over(REQUEST_ID, "bb")
    assert None is await log.take_over(UNKNOWN_ID, "aa")
    await log.append(REQUEST_ID, 1, tokens(2, 2))


@pytest.mark.parametrize("write", WRITES, ids=["append", "end", "write"])
async def test_an_older_session_is_refused(client: StateClient, write: Callable[[StreamLog], Awaitable[None]]) -> None:
    """Whatever it writes: an end precedes a takeover, or it does not happen."""
    log = StreamLog(client)
    await log.write(HEAD, 1, tokens(1, 1))
    await log.take_over(REQUEST_ID, "aa")
    assert ErrorCode.SUPERSEDED is await refused(write(log))
    read = await log.take_over(REQUEST_ID, "aa")
    assert read is not None
    assert (3, tokens(1, 1), None) == (read.session, read.tokens, read.outcome)


async def test_said_twice_is_written_once(client: StateClient) -> None:
    """A write whose answer was lost is said again."""
    log = StreamLog(client)
    await log.write(HEAD, 1, tokens(1, 0))
    for _ in range(2):
        await log.append(REQUEST_ID, 1, tokens(1, 3))
    read = await log.take_over(REQUEST_ID, "aa")
    assert read is not None
    assert tokens(1, 3) == read.tokens


async def test_a_lost_log_is_noticed_and_written_again(client: StateClient) -> None:
    """Emptied, or fallen back to an older state: the next write says so, and the whole log replaces what is there."""
    log = StreamLog(client)
    for is_empty in (True, False):
        await client.call("DEL", log_key(REQUEST_ID))
        if not is_empty:
            await log.write(HEAD, 3, tokens(1, 1))
        with pytest.raises(LogMissing):
            await log.append(REQUEST_ID, 3, tokens(3, 3))
        with pytest.raises(LogMissing):
            await log.end(REQUEST_ID, 3, 3, FINISHED)
    await log.write(HEAD, 3, tokens(1, 3))
    await log.end(REQUEST_ID, 3, 3, FINISHED)
    read = await log.take_over(REQUEST_ID, "aa")
    assert read is not None
    assert (tokens(1, 3), FINISHED) == (read.tokens, read.outcome)


async def test_a_write_that_comes_late_takes_nothing_back(client: StateClient) -> None:
    """Its caller has given it up and written more since."""
    log = StreamLog(client)
    await log.write(HEAD, 1, tokens(1, 3))
    await log.write(HEAD, 1, tokens(1, 2))
    await log.append(REQUEST_ID, 1, tokens(4, 4))
    read = await log.take_over(REQUEST_ID, "aa")
    assert read is not None
    assert tokens(1, 4) == read.tokens


async def test_a_write_that_comes_late_takes_no_end_back(client: StateClient) -> None:
    """Neither does one with more tokens: the first end stands."""
    log = StreamLog(client)
    await log.write(HEAD, 1, tokens(1, 2))
    await log.end(REQUEST_ID, 1, 2, FINISHED)
    for last in (2, 3):
        await log.write(HEAD, 1, tokens(1, last))
    read = await log.take_over(REQUEST_ID, "aa")
    assert read is not None
    assert (0, tokens(1, 2), FINISHED) == (read.session, read.tokens, read.outcome)


async def test_a_log_without_a_deadline_has_none(client: StateClient) -> None:
    """As an earlier version wrote it."""
    log = StreamLog(client)
    await log.write(HEAD, 1, tokens(1, 0))
    ((_, head),) = await client.call("XRANGE", log_key(REQUEST_ID), "-", "+")
    await client.call("DEL", log_key(REQUEST_ID))
    await client.call("XADD", log_key(REQUEST_ID), "*", *head[: head.index(b"deadline")])
    read = await log.take_over(REQUEST_ID, "aa")
    assert read is not None
    assert replace(HEAD, deadline_unix_ms=0) == read.head


async def test_a_store_that_stands_still_takes_no_reader_off(client: StateClient, valkey: RedisServer) -> None:
    """A takeover that was refused for its silence is not done when it wakes."""
    log = StreamLog(client)
    await log.write(HEAD, 1, tokens(1, 1))
    impatient = StateClient(valkey.url)  # as a service waits
    valkey.pause()
    try:
        with pytest.raises(ServingError):
            await StreamLog(impatient).take_over(REQUEST_ID, "aa")
    finally:
        valkey.resume()
        await impatient.close()
    await log.append(REQUEST_ID, 1, tokens(2, 2))


async def test_a_takeover_that_comes_late_is_none(client: StateClient, valkey: RedisServer) -> None:
    """The store stands still between the sign of life and the takeover: its caller has been refused, and has asked again."""

    class StandsStill(StateClient):
        async def call(self, *command: str | int | bytes) -> Any:
            reply = await super().call(*command)
            if command[0] == "TIME":
                valkey.pause()
                self.timeout_s = 0.2  # the takeover's, of which nothing is to come in time
            return reply

    log = StreamLog(client)
    await log.write(HEAD, 1, tokens(1, 1))
    impatient = StandsStill(valkey.url, timeout_s=CALL_S)
    try:
        with pytest.raises(ServingError):
            await StreamLog(impatient).take_over(REQUEST_ID, "aa")
    finally:
        valkey.resume()
        await impatient.close()
    await log.append(REQUEST_ID, 1, tokens(2, 2))
    again = await log.take_over(REQUEST_ID, "aa")
    assert again is not None
    assert (2, tokens(1, 2)) == (again.session, again.tokens)


async def test_readers_that_write_nothing_leave_nothing(client: StateClient) -> None:
    """A client that comes again and again does not make the log grow."""
    log = StreamLog(client)
    await log.write(HEAD, 1, tokens(1, 2))
    sizes: set[int] = set()
    for session in range(2, 12):
        read = await log.take_over(REQUEST_ID, "aa")
        assert read is not None
        assert (session, tokens(1, 2)) == (read.session, read.tokens)
        sizes.add(int(await client.call("XLEN", log_key(REQUEST_ID))))
    assert {3} == sizes
    await log.append(REQUEST_ID, 11, tokens(3, 3))


async def test_every_log_has_a_time_to_live(client: StateClient) -> None:
    """An hour from the last write, ten minutes from the end."""
    log = StreamLog(client)
    await log.write(HEAD, 1, tokens(1, 0))
    await client.call("PEXPIRE", log_key(REQUEST_ID), A_MINUTE_MS)
    await log.append(REQUEST_ID, 1, tokens(1, 1))
    assert LIVE_LOG_TTL_MS - A_MINUTE_MS < int(await client.call("PTTL", log_key(REQUEST_ID))) <= LIVE_LOG_TTL_MS
    await log.end(REQUEST_ID, 1, 1, FINISHED)
    assert ENDED_LOG_TTL_MS - A_MINUTE_MS < int(await client.call("PTTL", log_key(REQUEST_ID))) <= ENDED_LOG_TTL_MS


async def test_what_nobody_can_read_is_not_there(client: StateClient) -> None:
    """A log of another version, with a warning and without an exception."""
    log = StreamLog(client)
    await client.call("XADD", log_key(REQUEST_ID), "*", "session", 1, "upto", 0, "key", "aa", "odd", "x")
    assert None is await log.take_over(REQUEST_ID, "aa")


async def test_a_store_that_is_away_is_said(client: StateClient, valkey: RedisServer) -> None:
    """Reading and writing alike."""
    log = StreamLog(client)
    valkey.stop()
    assert ErrorCode.STATE_UNAVAILABLE is await refused(log.append(REQUEST_ID, 1, tokens(1, 1)))
    with pytest.raises(ServingError) as error:
        await log.take_over(REQUEST_ID, "aa")
    assert ErrorCode.STATE_UNAVAILABLE is error.value.code
