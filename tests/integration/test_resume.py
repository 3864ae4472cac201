"""Resumable answers through a system with two gateways: cut, taken over, superseded, replayed, given up."""

import asyncio
import codecs
import os
import signal
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from tests.support import leaks
from tests.support.cancelling import live, outcomes, wait_outcomes
from tests.support.chat import CHAT_PATH, ask, collect
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.http_client import HttpStream, exchange, open_request
from tests.support.polling import eventually
from tests.support.ports import ADMIN_OFFSET
from tests.support.redis_server import connect
from tests.support.resuming import API_PATH, STREAMS_PATH, ReadSoFar, ask_resumable, read_on, resume
from tests.support.script import Script, counting

GRACE_S = 6.0
ANSWER_WITHIN_S = 120.0
# Characters of one to four bytes in pieces that cut them, and tokens without a text of their own.
CROOKED = Script(
    pieces=["a", b"\xc3", b"\xa4", "€uro ", b"\xf0\x9f", b"\x98", b"\x80", "", "b\u2028", "##", "# ", b"\xe2\x82"],
    repeat=2,
)
# 4 KiB a token, and more tokens than its outbox and the sockets hold: it cannot end before somebody has read most of it.
BIG = "0123456789abcdef" * 256
UNREAD = Script(pieces=[f"{number}:{BIG}" for number in range(3)], repeat=200)
SMALL_BUFFER = 8_192
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def two_gateways() -> Generator[Cluster]:
    """Two gateways, two workers a role."""
    plan = ClusterPlan().scripted().prefill(2).decode(2).gateways(2).setting("resumable_grace_s", GRACE_S)
    with plan.start() as cluster:
        yield cluster


@pytest.fixture
async def pair(two_gateways: Cluster) -> AsyncGenerator[Cluster]:
    """Ready before each test; without leaks after it."""
    await two_gateways.wait_ready()
    for port in ports(two_gateways):
        await ask(port, counting(3).body())
    baseline = await leaks.capture(two_gateways)
    yield two_gateways
    await two_gateways.wait_ready()
    await leaks.assert_no_leaks(two_gateways, baseline, within_s=GRACE_S + 40)


def ports(cluster: Cluster) -> tuple[int, int]:
    """Of the two gateways."""
    return cluster.port, cluster.port + 1


async def gateway_pid(port: int) -> int:
    """By its own word."""
    status = (await exchange(port + ADMIN_OFFSET, "GET", "/status")).json()
    (gateway,) = [service for service in status["services"] if service["role"] == "gateway"]
    return int(gateway["pid"])


async def finish_elsewhere(port: int, reads: Sequence[ReadSoFar]) -> None:
    """All go on at once, to their ends: none may wait for its turn longer than the grace."""

    async def finish(read: ReadSoFar) -> None:
        async with resume(port, read) as stream:
            await read_on(stream, read)

    async with asyncio.timeout(ANSWER_WITHIN_S), asyncio.TaskGroup() as group:
        for read in reads:
            group.create_task(finish(read))


def check(script: Script, read: ReadSoFar) -> None:
    """The uncut answer, once, with the client's own counts."""
    assert None is read.error
    assert (script.text(), "stop") == (read.text, read.finish_reason)
    usage = read.usage or {}
    assert (script.num_prompt_tokens, script.num_pieces + 1) == (usage["prompt_tokens"], usage["completion_tokens"])


@pytest.mark.parametrize("path", [CHAT_PATH, API_PATH])
async def test_cut_after_every_event(pair: Cluster, path: str) -> None:
    """After each event in turn the client goes to the other gateway: joined, the text is that of the uncut answer."""
    here, there = ports(pair)
    async with ask_resumable(here, CROOKED, path=path) as (stream, whole):
        await read_on(stream, whole)
    check(CROOKED, whole)
    for num_events in range(1, whole.num_events):
        async with ask_resumable(here, CROOKED, path=path) as (stream, read):
            await read_on(stream, read, max_events=num_events)
            stream.cut()
        async with resume(there, read) as stream:
            await read_on(stream, read)
        check(CROOKED, read)


async def read_text(stream: HttpStream, read: ReadSoFar) -> None:
    """One more, and whatever came with it; or the word that the answer is over."""
    before = read.last_id
    while read.last_id == before and not read.is_over:
        num_events = read.num_events
        await read_on(stream, read, max_events=1)
        assert read.num_events > num_events, "the stream has ended"


@pytest.mark.parametrize("path", [CHAT_PATH, API_PATH])
async def test_cut_after_each_event_of_one_answer(pair: Cluster, path: str) -> None:
    """One text a connection, the gateways in turn, while the answer is being made."""
    for step_ms in (100, 400, 1_600):  # on a busy machine an answer may be over after a few connections
        if await num_texts_while_live(pair, Script(pieces=CROOKED.pieces, repeat=2, step_ms=step_ms), path) >= 2:
            return
    raise AssertionError("each of three answers was over before it was read on")


async def num_texts_while_live(pair: Cluster, script: Script, path: str) -> int:
    """How many connections an answer was read over, one text each, before its end was known."""
    before = await outcomes(pair)
    async with ask_resumable(pair.port, script, path=path) as (stream, read):
        await read_text(stream, read)
    num_texts, num_while_live = 1, 0
    while not read.is_over:
        async with resume(ports(pair)[num_texts % 2], read) as stream:
            await read_text(stream, read)
        num_texts += 1
        num_while_live += await outcomes(pair) == before
    async with resume(pair.port, read) as stream:
        await read_on(stream, read)
    check(script, read)
    return num_while_live


async def test_a_stop_string_across_a_cut(pair: Cluster) -> None:
    """Its beginning was seen by one gateway, its end by the other."""
    script = Script(pieces=["a", "#", "#", "b", "#", *["#"] * 2, "c", "d"], step_ms=50)
    for num_events in range(1, 5):
        async with ask_resumable(pair.port, script, stop=["###"]) as (stream, read):
            await read_on(stream, read, max_events=num_events)
            stream.cut()
        async with resume(pair.port + 1, read) as stream:
            await read_on(stream, read)
        assert ("a##b", "stop", 7) == (read.text, read.finish_reason, (read.usage or {})["completion_tokens"])


async def test_a_gateway_dies_in_mid_answer(pair: Cluster) -> None:
    """kill -9: its resumable streams go on at the other one, token for token; its plain one is cancelled, and so is, after
    the grace, a resumable one that nobody reads on.
    """
    before = await outcomes(pair)
    here, there = ports(pair)
    scripts = [counting(150, step_ms=20), counting(151, step_ms=20), UNREAD, UNREAD]
    async with AsyncExitStack() as stack:
        streams = [
            await stack.enter_async_context(ask_resumable(here, script, receive_buffer=SMALL_BUFFER))
            for script in scripts
        ]
        for stream, read in streams:
            await read_on(stream, read, max_events=4)
        plain = await stack.enter_async_context(live(pair, counting(2_000, step_ms=20)))
        await collect(plain, until_deltas=2)
        unread, forgotten = await stack.enter_async_context(ask_resumable(here, counting(2_000, step_ms=20)))
        await read_on(unread, forgotten, max_events=4)
        os.kill(await gateway_pid(here), signal.SIGKILL)
        for script, (stream, read) in zip(scripts, streams, strict=True):
            await read_on(stream, read)
            assert not (read.is_over and script is UNREAD)  # the others are by the clock
        await finish_elsewhere(there, [read for _, read in streams])
    for script, (_, read) in zip(scripts, streams, strict=True):
        check(script, read)
    await eventually(
        lambda: outcomes(there_only(pair)),
        lambda now: (
            (len(scripts), 2)
            == (now["finished"] - before.get("finished", 0), now.get("cancelled", 0) - before.get("cancelled", 0))
        ),
        within_s=60.0,
        what="the resumed ones finished, the others cancelled",
    )
    async with resume(there, forgotten) as late:
        await read_on(late, forgotten)
    assert "cancelled" == forgotten.error


def there_only(pair: Cluster) -> Cluster:
    """The system as its second gateway sees it, while the first is away."""
    return replace(pair, port=pair.port + 1)


async def test_a_newer_reader_supersedes_the_older(pair: Cluster) -> None:
    """On the same gateway and on the other, in either dialect: the older is told, the newer has the whole answer."""
    script = UNREAD
    for port, path in zip(ports(pair), (CHAT_PATH, API_PATH), strict=True):
        async with ask_resumable(pair.port, script, path=path, receive_buffer=SMALL_BUFFER) as (stream, older):
            await read_on(stream, older, max_events=5)
            newer = ReadSoFar(request_id=older.request_id)
            async with asyncio.timeout(ANSWER_WITHIN_S), resume(port, newer) as resumed:
                await read_on(stream, older)
                await read_on(resumed, newer)
        assert "superseded" == older.error
        assert script.text().startswith(older.text)
        check(script, newer)


async def test_only_the_same_key_reads_on(pair: Cluster) -> None:
    """Or cancels. Another key, none, an unknown id, a plain answer: 404; and the reader is not disturbed."""
    script = counting(60, step_ms=20)
    key = {"Authorization": "Bearer one"}
    async with ask_resumable(pair.port, script, headers=key) as (stream, read):
        await read_on(stream, read, max_events=3)
        unknown = ReadSoFar(request_id="chatcmpl-01J0000000000000000000000A")
        other: dict[str, str] = {"Authorization": "Bearer two"}
        for asked, headers in ((read, other), (read, {}), (unknown, key)):
            async with resume(pair.port + 1, asked, headers=headers) as refused:
                assert 404 == refused.status
                assert b"request_not_found" in await refused.read_body()
            path = f"/v1/requests/{asked.request_id}"
            assert 404 == (await exchange(pair.port + 1, "DELETE", path, headers=headers)).status
        await read_on(stream, read)
        check(script, read)
    async with live(pair, script) as plain:
        record = await collect(plain, until_deltas=1)
        async with resume(pair.port, ReadSoFar(request_id=record.request_id)) as refused:
            assert 404 == refused.status
        await collect(plain, record=record)


@pytest.mark.parametrize("path", [CHAT_PATH, API_PATH])
async def test_a_finished_answer_is_shown_again(pair: Cluster, path: str) -> None:
    """From any token on, inside a character too, as often as one likes, for ten minutes, in its own dialect.

    Nothing is computed for it.
    """
    before = await outcomes(pair)
    async with ask_resumable(pair.port, CROOKED, path=path) as (stream, first):
        await read_on(stream, first)
    for port in ports(pair):
        again = ReadSoFar(request_id=first.request_id)
        async with resume(port, again) as stream:
            await read_on(stream, again)
        check(CROOKED, again)
        assert first.usage == again.usage
    for num_tokens in range(CROOKED.num_pieces + 1):
        played = (list(CROOKED.pieces) * CROOKED.repeat)[:num_tokens]
        begun = b"".join(piece.encode() if isinstance(piece, str) else piece for piece in played)
        text = codecs.getincrementaldecoder("utf-8")("replace").decode(begun)
        url = f"{STREAMS_PATH}chatcmpl-{first.request_id}?from={num_tokens}"
        async with open_request(ports(pair)[num_tokens % 2], "GET", url) as stream:
            rest = await read_on(stream, ReadSoFar(request_id=first.request_id))
        assert (CROOKED.text(), "stop") == (text + rest.text, rest.finish_reason), num_tokens
    await wait_outcomes(pair, before, finished=1)
    assert 400 == (await pair.get(f"{STREAMS_PATH}{first.request_id}?from=-1")).status
    with connect(f"redis://{(await pair.status()).one('redis').address}/0") as client:
        key = f"firsttoken:1:log:{{{first.request_id}}}"
        assert 600 - ANSWER_WITHIN_S < client.ttl(key) <= 600
        client.pexpire(key, 1)
        await eventually(
            lambda: pair.get(STREAMS_PATH + first.request_id),
            lambda answer: answer.status == 404,
            within_s=30.0,
            what="it is over",
        )


async def test_a_client_that_does_not_come_back(pair: Cluster) -> None:
    """Cancelled after the grace and not before; whoever comes later is told that."""
    before = await outcomes(pair)
    clock = asyncio.get_running_loop()
    async with ask_resumable(pair.port, counting(3_000, step_ms=10)) as (stream, read):
        await read_on(stream, read, max_events=3)
        left_at = clock.time()
        stream.cut()
    await eventually(
        lambda: outcomes(pair),
        lambda now: now.get("cancelled", 0) == before.get("cancelled", 0) + 1,
        within_s=GRACE_S + 40,
        what="cancelled",
    )
    assert clock.time() - left_at >= GRACE_S - 0.5
    async with resume(pair.port + 1, read) as late:
        await read_on(late, read)
    assert "cancelled" == read.error


async def test_a_deadline_goes_along(pair: Cluster) -> None:
    """Who reads on elsewhere has what is left of the time, and not all of it again."""
    clock, timeout_s = asyncio.get_running_loop(), 8.0
    asked_at = clock.time()
    async with ask_resumable(pair.port, counting(3_000, step_ms=20), timeout=timeout_s) as (stream, read):
        await read_on(stream, read, max_events=3)
        stream.cut()
    async with asyncio.timeout(ANSWER_WITHIN_S), resume(pair.port + 1, read) as stream:
        await read_on(stream, read)
    assert "timeout" == read.error
    assert timeout_s - 1 < clock.time() - asked_at < 40  # all by itself it lasts for a minute


async def test_delete_is_at_once(pair: Cluster) -> None:
    """By either path, on the gateway that does not serve it; the reader is told, and a later one too."""
    for path in ("/v1/streams/", "/v1/requests/"):
        async with ask_resumable(pair.port, counting(3_000, step_ms=20)) as (stream, read):
            await read_on(stream, read, max_events=3)
            async with asyncio.timeout(40):  # left alone it lasts for 60 s
                answer = await exchange(pair.port + 1, "DELETE", path + read.request_id)
                await read_on(stream, read)
        assert answer.status in (200, 202), answer.body  # 202 where the blocks are free only after 2 s
        assert "cancelled" == answer.json()["outcome"] == read.error
        later = ReadSoFar(request_id=read.request_id)
        async with resume(pair.port, later) as late:
            await read_on(late, later)
        assert "cancelled" == later.error


async def test_a_worker_dies_between_two_readers(pair: Cluster) -> None:
    """The client is away while its decode worker is lost; what it reads then goes on where it was."""
    scripts = [counting(200 + number, step_ms=20) for number in range(4)]
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(ask_resumable(pair.port, script)) for script in scripts]
        for stream, read in streams:
            await read_on(stream, read, max_events=4)
            stream.cut()
        os.kill((await pair.status()).of_role("decode")[0].live_pid, signal.SIGKILL)
        await finish_elsewhere(pair.port + 1, [read for _, read in streams])
    for script, (_, read) in zip(scripts, streams, strict=True):
        check(script, read)


async def test_the_audit_sees_every_gateway(pair: Cluster) -> None:
    """What is open at the second one is found; so the end of each test here speaks of both."""
    baseline = await leaks.capture(pair)
    async with ask_resumable(pair.port + 1, counting(3_000, step_ms=10)) as (stream, read):
        await read_on(stream, read, max_events=3)
        _, second = await pair.gateways()
        with pytest.raises(AssertionError, match=f"{second.id}: firsttoken_active_streams is 1"):
            await leaks.assert_no_leaks(pair, baseline, within_s=0.5)
        await exchange(pair.port + 1, "DELETE", f"/v1/requests/{read.request_id}")


async def test_only_what_is_resumable_is_stored(pair: Cluster) -> None:
    """Without `resumable` neither question nor answer is in Redis; with the header, which is enough, both are."""
    script = Script(pieces=["Xyzzy", " plugh"], repeat=20, step_ms=10)
    redis = (await pair.status()).one("redis")
    with connect(f"redis://{redis.address}/0") as client:

        def logs() -> set[str]:
            return {key for key in client.scan_iter(match="*") if client.type(key) == "stream"}

        async def asked(headers: dict[str, str]) -> tuple[ReadSoFar, set[str], str]:
            """The answer, the logs that were not there before, and all else as one text."""
            before = logs()
            body = {**script.body(), "stream": True}
            async with open_request(pair.port, "POST", CHAT_PATH, body=body, headers=headers) as stream:
                read = ReadSoFar(request_id=stream.headers["x-firsttoken-request"])
                await stream.read_body()
            others = [
                (key, client.hgetall(key) if client.type(key) == "hash" else client.get(key))
                for key in client.scan_iter(match="*")
                if client.type(key) != "stream"
            ]
            return read, logs() - before, repr(others)

        plain, stored, others = await asked({})
        assert set() == stored
        assert plain.request_id in others
        assert "Xyzzy" not in others
        resumable, stored, others = await asked({"X-Resumable": "1"})
        assert {f"firsttoken:1:log:{{{resumable.request_id}}}"} == stored
        assert "Xyzzy" not in others


async def test_a_frozen_gateway_wakes_after_its_answer_was_taken_over(pair: Cluster) -> None:
    """Neither what it writes nor what it acknowledges counts any more; its client is told and gets no wrong text."""
    script = counting(150, step_ms=20)
    pid = await gateway_pid(pair.port)
    async with ask_resumable(pair.port, script) as (stream, older):
        await read_on(stream, older, max_events=5)
        newer = ReadSoFar(request_id=older.request_id)
        os.kill(pid, signal.SIGSTOP)
        try:
            async with resume(pair.port + 1, newer) as resumed:
                await read_on(resumed, newer, max_events=40)
                os.kill(pid, signal.SIGCONT)
                await read_on(stream, older)
                await read_on(resumed, newer)
        finally:
            os.kill(pid, signal.SIGCONT)
    assert "superseded" == older.error
    assert script.text().startswith(older.text)
    check(script, newer)
