import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId, WorkerId
from shared.domain.request import FinishReason, RequestState, StoredRequest
from shared.state.client import StateClient
from shared.state.keys import ENDED_REQUEST_TTL_MS, LIVE_REQUEST_TTL_MS, request_key
from shared.state.requests import NewerEpoch, RequestStore
from tests.support.redis_server import RedisServer

A_MINUTE_MS = 60_000  # since a write, on the slowest machine
QUEUED = StoredRequest(
    request_id=RequestId("01J0000000000000000000000A"),
    state=RequestState.QUEUED,
    attempt=Attempt(1),
    epoch=Epoch(1_700_000_000_000),
    gateway_incarnation=Incarnation(2**64 - 1),
    admitted_unix_ms=1_700_000_000_500,
    seed=2**64 - 1,
    key_hash="0123456789abcdef",
)
PLACED = replace(
    QUEUED, state=RequestState.PLACING, prefill_worker=WorkerId("prefill-0"), decode_worker=WorkerId("decode-0")
)
FINISHED = replace(PLACED, state=RequestState.FINISHED, finish_reason=FinishReason.STOP, completion_tokens=7)
FAILED = replace(PLACED, state=RequestState.FAILED, error_code="WORKER_LOST", completion_tokens=3)
WRITES: list[Callable[[RequestStore], Any]] = [
    lambda store: store.admit(QUEUED),
    lambda store: store.place(PLACED),
    lambda store: store.finish(FINISHED),
    lambda store: store.rewrite(PLACED),
]


async def ttl_ms(client: StateClient) -> int:
    """Of the record."""
    return int(await client.call("PTTL", request_key(QUEUED.request_id)))


async def test_three_writes_of_a_request(client: StateClient) -> None:
    """Each write is read back field by field, the largest 64-bit numbers included; the end leaves the live ones."""
    store = RequestStore(client)
    await store.admit(QUEUED)
    assert [QUEUED] == await store.load_live()
    await store.place(PLACED)
    assert [PLACED] == await store.load_live()
    await store.finish(FINISHED)
    assert [] == await store.load_live()
    assert FINISHED == await store.load(QUEUED.request_id)


async def test_every_record_has_a_time_to_live(client: StateClient) -> None:
    """A day while it lives, ten minutes after its end."""
    store = RequestStore(client)
    await store.admit(QUEUED)
    assert LIVE_REQUEST_TTL_MS - A_MINUTE_MS < await ttl_ms(client) <= LIVE_REQUEST_TTL_MS
    await store.finish(FINISHED)
    assert ENDED_REQUEST_TTL_MS - A_MINUTE_MS < await ttl_ms(client) <= ENDED_REQUEST_TTL_MS


async def test_record_holds_no_content(client: StateClient) -> None:
    """Exactly these fields: no prompt, no token, no text, and of the key a hash."""
    await RequestStore(client).finish(FINISHED)
    fields = {name.decode() for name in await client.call("HKEYS", request_key(QUEUED.request_id))}

    assert fields == {
        "state",
        "attempt",
        "epoch",
        "gateway_incarnation",
        "admitted_unix_ms",
        "seed",
        "prefill_worker",
        "decode_worker",
        "finish_reason",
        "error_code",
        "completion_tokens",
        "session",
        "key_hash",
    }


@pytest.mark.parametrize("older", [{"epoch": Epoch(QUEUED.epoch - 1)}, {"attempt": Attempt(0)}])
@pytest.mark.parametrize("step", ["admit", "place", "rewrite", "finish"])
async def test_older_epoch_or_attempt_is_refused(client: StateClient, step: str, older: dict[str, int]) -> None:
    """A scheduler that lost its lease changes nothing, nor does an attempt that is over."""
    store = RequestStore(client)
    await store.admit(QUEUED)
    stale = replace(FINISHED if step == "finish" else PLACED, **older)  # pyright: ignore[reportArgumentType]

    with pytest.raises(ServingError) as caught:
        await getattr(store, step)(stale)
    assert ErrorCode.STALE_ATTEMPT == caught.value.code
    assert ("epoch" in older) is isinstance(caught.value, NewerEpoch)
    assert [QUEUED] == await store.load_live()


async def test_newer_epoch_takes_over(client: StateClient) -> None:
    """After that the old scheduler is refused."""
    store = RequestStore(client)
    await store.place(PLACED)
    newer = replace(FAILED, epoch=Epoch(QUEUED.epoch + 1))
    await store.finish(newer)
    with pytest.raises(ServingError) as caught:
        await store.finish(FINISHED)

    assert ErrorCode.STALE_ATTEMPT == caught.value.code
    assert newer == await store.load(QUEUED.request_id)


async def test_first_outcome_stands(client: StateClient) -> None:
    """A second end is no error and changes nothing; a late write of a live state is refused."""
    store = RequestStore(client)
    await store.finish(FINISHED)
    await store.finish(FAILED)
    with pytest.raises(ServingError) as caught:
        await store.place(PLACED)

    assert ErrorCode.STALE_ATTEMPT == caught.value.code
    assert not isinstance(caught.value, NewerEpoch), "the active scheduler itself may be told so"
    assert FINISHED == await store.load(QUEUED.request_id)


async def test_finish_needs_an_end(client: StateClient) -> None:
    """A live state would get the short time to live."""
    with pytest.raises(ValueError, match="not an end"):
        await RequestStore(client).finish(QUEUED)


@pytest.mark.parametrize("write", WRITES)
async def test_every_write_may_be_repeated(client: StateClient, write: Callable[[RequestStore], Any]) -> None:
    """A write whose answer was lost is sent again."""
    store = RequestStore(client)
    await write(store)
    once = await store.load(QUEUED.request_id)
    await write(store)

    assert once is not None
    assert once == await store.load(QUEUED.request_id)


async def test_many_live_records_in_order_of_admission(client: StateClient) -> None:
    """More than one page of SCAN; ended, foreign and unreadable records are left out."""
    store = RequestStore(client)
    live = [replace(QUEUED, request_id=RequestId(f"request-{n:04}"), admitted_unix_ms=10_000 - n) for n in range(1200)]
    for stored in live:
        await store.admit(stored)
    await store.finish(FINISHED)
    await client.call("HSET", request_key(RequestId("other-version")), "state", "dreaming")
    await client.call("SET", request_key(RequestId("no-record")), "something of others")
    await client.call("HSET", "firsttoken:1:request:without-braces", "state", "queued")

    assert list(reversed(live)) == await store.load_live()


async def test_what_is_no_record_gives_way_to_one(client: StateClient) -> None:
    """Something else under a request's key hides no record, and lives no longer than one."""
    store = RequestStore(client)
    await client.call("SET", request_key(QUEUED.request_id), "something of others")
    await store.admit(QUEUED)
    assert [QUEUED] == await store.load_live()
    assert LIVE_REQUEST_TTL_MS - A_MINUTE_MS < await ttl_ms(client) <= LIVE_REQUEST_TTL_MS


@pytest.mark.parametrize("write", WRITES)
async def test_redis_away_is_state_unavailable(
    client: StateClient, valkey: RedisServer, write: Callable[[RequestStore], Any]
) -> None:
    """Whichever write it was; and on the empty store that comes back a rewrite makes the record again."""
    store = RequestStore(client)
    await store.admit(QUEUED)
    await asyncio.to_thread(valkey.stop)
    with pytest.raises(ServingError) as caught:
        await write(store)
    assert ErrorCode.STATE_UNAVAILABLE == caught.value.code

    await asyncio.to_thread(valkey.start)
    assert [] == await store.load_live()
    await store.rewrite(PLACED)
    assert [PLACED] == await store.load_live()
