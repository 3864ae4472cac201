"""Senders against a decode worker that answers as each test says."""

import asyncio
from dataclasses import replace

import pytest

from prefill_worker import sender
from shared.aio.scope import spawn
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Incarnation
from shared.kv.frame_plan import LayersDone
from shared.kv.frames import FrameRange, RejectCode
from shared.transfer import staging
from tests.support import sender_bench
from tests.support.breaking_group import BreakingGroup
from tests.support.sender_bench import LAYOUT, Bench, bench


@pytest.fixture(autouse=True, params=["grpc", "shm"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The one that decode chooses."""
    monkeypatch.setattr(sender, "ANSWER_TIMEOUT_S", 30.0)  # a slow answer breaks no stream here
    monkeypatch.setattr(sender_bench, "chosen_transport", request.param)
    return request.param


def tokens(*frames: tuple[int, int]) -> list[FrameRange]:
    """Frames of all layers over these token ranges."""
    return [FrameRange(layer_start=0, layer_end=2, token_start=start, token_end=end) for start, end in frames]


async def test_frames_leave_as_chunks_are_computed() -> None:
    """Whole blocks at once, the partly filled one when the prompt is computed; the job ends when all is acknowledged."""
    async with bench() as b:
        b.job.cached_tokens = 4
        b.senders.start(b.job)
        b.compute(6)
        await b.decode.until(lambda: b.decode.frames == [tokens((0, 4))])
        assert b.table.ends == []
        b.compute(10)

        assert await b.end() == ["sent"]
        assert b.decode.frames == [tokens((0, 4), (4, 10))]
        assert (b.decode.num_hellos, b.decode.num_first_tokens, b.decode.cached_tokens) == (1, 1, 4)
        assert b.job.sent_bytes == 3 * LAYOUT.block_bytes


async def test_bytes_and_the_exposed_time_are_counted(transport: str) -> None:
    """Every payload is what its frame says; bytes count by transport, and each job that had a last step."""
    async with bench() as b:
        b.job.moments.computed_at = 0.0
        b.senders.start(b.job)
        b.compute(10)
        await b.end()
        text = b.metrics.render().decode()

        assert b.decode.num_good == len(b.decode.frames[0])
        assert f'firsttoken_kv_transfer_bytes_total{{transport="{transport}"}} {3.0 * LAYOUT.block_bytes}' in text
        assert "firsttoken_kv_transfer_exposed_seconds_count 1.0" in text


async def test_a_segment_that_is_refused_means_grpc(transport: str) -> None:
    """For this and the following transfers of the pair; nothing is lost by it."""
    async with bench() as b:
        b.decode.refuses_staging = True
        b.senders.start(b.job)
        b.compute(10)

        assert await b.end() == ["sent"]
        assert b.decode.transports == (["shm", "grpc"] if transport == "shm" else ["grpc"])
        assert await b.introductions.introduce(b.job.target) == "grpc"
        assert b.decode.frames[-1] == tokens((0, 10))


async def test_without_a_free_segment_the_transfer_goes_by_grpc(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one alone: the pair's transport stays."""
    monkeypatch.setattr(staging, "MAX_SEGMENTS", 0)
    async with bench() as b:
        b.senders.start(b.job)
        b.compute(10)

        assert await b.end() == ["sent"]
        assert b.decode.transports == ["grpc"]
        assert await b.introductions.introduce(b.job.target) == transport
        counted = 'firsttoken_kv_transport_fallbacks_total{reason="segments"} 1.0' in b.metrics.render().decode()
        assert counted is (transport == "shm")


async def test_a_segment_is_used_again_only_when_all_of_it_was_acknowledged() -> None:
    """After a stream that broke with a frame under way none is kept; after a whole transfer one is."""
    async with bench() as b:
        b.decode.acks.clear()
        b.senders.start(b.job)
        b.compute(8)
        await b.decode.until(lambda: bool(b.decode.frames) and len(b.decode.frames[0]) > 0)
        b.job.stopped.set()
        async with asyncio.timeout(30):
            while b.staging.num_segments:
                await asyncio.sleep(0.001)
    async with bench() as b:
        b.senders.start(b.job)
        b.compute(10)
        await b.end()

        assert b.staging.num_segments == (1 if b.decode.transport == "shm" else 0)


async def test_layers_of_the_last_chunk_leave_before_it_is_done() -> None:
    """What is told of it goes at once, the rest when it is computed."""
    async with bench() as b:
        b.senders.start(b.job)
        b.compute(8)
        b.job.running = LayersDone(token_end=10, num_layers=1, is_last=True)
        await b.decode.until(lambda: bool(b.decode.frames) and len(b.decode.frames[0]) == 2)
        b.compute(10)

        assert await b.end() == ["sent"]
        assert [*tokens((0, 8)), _layer(0, 8, 10), _layer(1, 8, 10)] == b.decode.frames[0]


def _layer(layer: int, start: int, end: int) -> FrameRange:
    return FrameRange(layer_start=layer, layer_end=layer + 1, token_start=start, token_end=end)


async def test_no_more_frames_than_the_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight unacknowledged ones; the ninth waits for an acknowledgement."""
    monkeypatch.setattr(sender, "KEEP_ALIVE_S", 0.05)
    async with bench(num_prompt_tokens=80) as b:
        b.decode.acks.clear()
        b.senders.start(b.job)
        for upto in range(4, 81, 4):
            b.compute(upto)
            if upto <= 32:
                await b.decode.until(
                    lambda number=upto // 4: bool(b.decode.frames) and len(b.decode.frames[0]) == number
                )
        before = b.decode.num_keep_alives  # between two frames there may have been some, and one may be on its way
        await b.decode.until(lambda: b.decode.num_keep_alives >= before + 2)
        assert len(b.decode.frames[0]) == 8
        b.decode.acks.set()

        assert await b.end() == ["sent"]
        assert b.decode.most_unacknowledged <= 8


async def test_a_broken_stream_is_opened_again_for_the_rest() -> None:
    """What decode names as held is not sent again; token 1 was told once."""
    async with bench(num_prompt_tokens=12) as b:
        b.decode.num_breaks = 1
        b.decode.held = [(), tuple(tokens((0, 4)))]
        b.senders.start(b.job)
        b.compute(4)
        await b.decode.until(lambda: b.decode.frames == [tokens((0, 4))])
        b.compute(8)
        await b.decode.until(lambda: b.decode.num_streams == 2 and b.decode.frames[1] == tokens((4, 8)))
        b.compute(12)

        assert await b.end() == ["sent"]
        assert b.decode.frames == [tokens((0, 4), (4, 8)), tokens((4, 8), (8, 12))]
        assert b.decode.num_first_tokens == 1


@pytest.mark.parametrize(
    ("code", "expected", "error"),
    [
        (RejectCode.GONE, "dropped", None),
        (RejectCode.FAULT, "dropped", None),
        (RejectCode.STALE_INCARNATION, "failed", ErrorCode.KV_TRANSFER_FAILED),
        (RejectCode.UNKNOWN_TRANSFER, "failed", ErrorCode.KV_TRANSFER_FAILED),
        (RejectCode.BAD_CHECKSUM, "failed", ErrorCode.KV_CORRUPT),
    ],
)
async def test_a_rejection_ends_the_job(code: RejectCode, expected: str, error: ErrorCode | None) -> None:
    """Quietly where decode has told the scheduler itself, else as a failure that the scheduler hears of."""
    async with bench() as b:
        b.decode.reject_with = code
        b.senders.start(b.job)

        assert await b.end() == [expected]
        assert error == (b.table.error.code if b.table.error else None)
        assert b.decode.num_streams == 1


async def test_one_who_is_not_known_says_hello_again() -> None:
    """A decode worker that has forgotten the pair is introduced to anew, and the transfer goes on."""
    async with bench() as b:
        b.decode.reject_with = RejectCode.NO_HANDSHAKE
        b.senders.start(b.job)
        b.compute(10)

        assert await b.end() == ["sent"]
        assert b.decode.num_hellos == 2


async def test_a_first_token_that_is_refused_as_gone_ends_the_job_quietly() -> None:
    """The attempt has ended at decode, whatever frames were still to come."""
    async with bench() as b:
        b.decode.first_token_answers = [RejectCode.GONE]
        b.decode.acks.clear()
        b.senders.start(b.job)
        b.compute(10)

        assert await b.end() == ["dropped"]


async def test_an_unlike_layout_fails_the_job_with_the_reason() -> None:
    """Once, without a stream."""
    async with bench() as b:
        b.decode.refuses_hello = True
        b.senders.start(b.job)

        assert await b.end() == ["failed"]
        assert b.table.error == ServingError(ErrorCode.KV_CORRUPT, "unlike KV layouts: block_size 4 and 8")
        assert b.decode.num_streams == 0


async def test_nobody_there_is_given_up_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tried again with growing delays, then reported as a failed transfer."""
    monkeypatch.setattr(sender, "MAX_TRIES", 3)
    async with bench(address="127.0.0.1:1") as b:
        b.senders.start(b.job)

        assert await b.end() == ["failed"]
        assert b.table.error is not None
        assert b.table.error.code is ErrorCode.KV_TRANSFER_FAILED


async def test_a_stopped_job_sends_nothing_more_and_says_nothing() -> None:
    """The table has ended it and knows why."""
    async with bench() as b:
        b.senders.start(b.job)
        b.compute(4)
        await b.decode.until(lambda: bool(b.decode.frames) and len(b.decode.frames[0]) == 1)
        b.job.stopped.set()
        b.compute(10)

    assert b.table.ends == []
    assert b.decode.num_first_tokens == 0


async def test_senders_that_are_ended_while_a_stream_breaks_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task group keeps a cancel to itself while it fails: nothing is opened after it, though the job is not over."""
    breaking = BreakingGroup()

    async def push(_: object) -> None:
        await breaking.run()

    async def send(b: Bench) -> None:
        async with asyncio.TaskGroup() as group:
            monkeypatch.setattr(b.senders, "_group", group)
            b.senders.start(b.job)
            await asyncio.Event().wait()

    monkeypatch.setattr(sender._Transfer, "_push", push)  # pyright: ignore[reportPrivateUsage]
    async with asyncio.timeout(30), bench() as b, asyncio.TaskGroup() as group:
        sending = spawn(group, send(b), name="senders")
        await breaking.is_breaking.wait()
        sending.cancel()
        for _ in range(10):  # until it has reached the group that breaks
            await asyncio.sleep(0)
        breaking.may_end.set()
        await asyncio.wait({sending})

        assert (1, []) == (breaking.num_tries, b.table.ends)


async def test_keep_alives_hold_the_reservation_while_nothing_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that waits for its turn still gives signs on its stream."""
    monkeypatch.setattr(sender, "KEEP_ALIVE_S", 0.02)
    async with bench() as b:
        b.senders.start(b.job)
        await b.decode.until(lambda: b.decode.num_keep_alives >= 3)
        b.compute(10)

        assert await b.end() == ["sent"]


async def test_progress_that_fills_no_block_is_no_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks shorter than the keep-alive's interval, with nothing to send, do not put it off for ever."""
    monkeypatch.setattr(sender, "KEEP_ALIVE_S", 0.05)
    async with bench() as b:
        b.senders.start(b.job)
        async with asyncio.timeout(30):
            while b.decode.num_keep_alives < 3:
                b.job.progressed.set()
                await asyncio.sleep(0.001)
        b.compute(10)

        assert await b.end() == ["sent"]


async def test_jobs_that_start_at_once_say_hello_once() -> None:
    """Once for a pair of incarnations, not once for a request; another start of the same address is met anew."""
    async with bench() as b:
        async with asyncio.TaskGroup() as group:
            for _ in range(5):
                group.create_task(b.introductions.introduce(b.job.target))
        assert b.decode.num_hellos == 1
        with pytest.raises(ServingError, match="started anew"):
            await b.introductions.introduce(replace(b.job.target, incarnation=Incarnation(99)))

    assert b.decode.num_hellos == 2
