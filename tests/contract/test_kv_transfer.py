"""The decode worker against a sender that misbehaves, breaks off, is late or slow: no KV is ever used that is not whole."""

import gc
import threading
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from shared.domain.ids import BlockId, Incarnation, TransferId
from shared.domain.refusals import RefusedKind
from shared.engine.kv_digest import digest_layout
from shared.kv.frames import RejectCode
from shared.kv.memory import KvMemory
from shared.rpc.errors import serving_error
from shared.transfer.staging import SEGMENT_NAME
from shared.wire import common_pb2, kv_pb2, scheduler_pb2
from tests.support.polling import eventually
from tests.support.raw_sender import RawSender
from tests.support.refusals import refused
from tests.support.worker_pair import WorkerPair, expected_ids, key_of, scripted_engine, scripted_spec, worker_pair

pytestmark = pytest.mark.usefixtures("transport")
NUM_PROMPT_TOKENS = 100  # seven blocks, the last one partly filled


class SlowMemory(KvMemory):
    """Copies into it wait for `may_write`."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(digest_layout(16), num_blocks)
        self.may_write = threading.Event()
        self.is_writing = threading.Event()

    def write(
        self, block_ids: Sequence[BlockId], *, layer_start: int, layer_end: int, payload: bytes | memoryview
    ) -> None:
        """As any other, but late."""
        self.is_writing.set()
        assert self.may_write.wait(60)
        super().write(block_ids, layer_start=layer_start, layer_end=layer_end, payload=payload)


async def aborted_in_mid_copy(pair: WorkerPair) -> None:
    """Attempt `a` has ended on decode and waits for its copy: commands are taken in order, and the next has been answered."""
    await pair.scheduler.send("decode-0", key_of("a"), abort=scheduler_pb2.Abort())
    await pair.ask(scripted_spec("next"))
    await pair.scheduler.until(lambda: bool(pair.scheduler.events("decode-0", key_of("next"))))


async def test_commit_needs_every_block_and_token_1() -> None:
    """Frames alone commit nothing, in whatever order they come; with token 1 the sequence joins the batch."""
    spec = scripted_spec("r", repeat=5, num_prompt_tokens=NUM_PROMPT_TOKENS)
    key = key_of("r")
    async with worker_pair(with_prefill=False) as pair:
        sender = RawSender(pair, spec, reserved := await pair.reserve(spec))
        await sender.hello()
        push = await sender.open()
        assert await push.held() == ()
        await push.send(list(reversed(sender.frames)))
        names = [event.WhichOneof("event") for event in pair.scheduler.events("decode-0", key)]
        assert names == ["reserved"]
        assert await sender.tell_first_token() is None
        await pair.scheduler.event("decode-0", key, "kv_committed")
        gateway = await pair.gateway()
        await gateway.attach(key, reserved.attach_ticket)
        await gateway.ended(key)

        assert expected_ids(spec) == gateway.ids["r"]


async def test_token_1_is_read_while_kv_moves_and_a_repeat_changes_nothing() -> None:
    """The reader has it before the first frame; told again, even another one, it stays what it was."""
    spec = scripted_spec("r", repeat=5, num_prompt_tokens=NUM_PROMPT_TOKENS)
    key = key_of("r")
    async with worker_pair(with_prefill=False) as pair:
        sender = RawSender(pair, spec, reserved := await pair.reserve(spec))
        await sender.hello()
        gateway = await pair.gateway()
        await gateway.attach(key, reserved.attach_ticket)
        assert await sender.tell_first_token() is None
        await gateway.until(lambda: len(gateway.ids["r"]) == 1)
        assert await sender.tell_first_token() is None
        assert await sender.tell_first_token(token_id=99) is None
        push = await sender.open()
        await push.held()
        await push.send(sender.frames)
        await gateway.ended(key)

        assert expected_ids(spec) == gateway.ids["r"]
        assert {RefusedKind.DOUBLED_FIRST_TOKEN: 2} == refused(pair.decode.metrics)


async def test_a_damaged_frame_fails_the_attempt() -> None:
    """One turned bit: the stream is rejected, the attempt told as corrupt, its blocks freed; nothing was decoded."""
    spec = scripted_spec("r", repeat=5, num_prompt_tokens=NUM_PROMPT_TOKENS)
    key = key_of("r")
    async with worker_pair(with_prefill=False) as pair:
        sender = RawSender(pair, spec, await pair.reserve(spec))
        await sender.hello()
        push = await sender.open()
        await push.held()
        await push.send(sender.frames[:2])
        await push.call.write(sender.message(3, sender.frames[2], flip=True))

        assert await push.rejected() is RejectCode.BAD_CHECKSUM
        failed = (await pair.scheduler.event("decode-0", key, "attempt_failed")).attempt_failed
        assert failed.error.code == "KV_CORRUPT"
        await pair.scheduler.idle("decode-0", 1024)
        assert {RefusedKind.FRAME: 1} == refused(pair.decode.metrics)
        assert await sender.tell_first_token() is RejectCode.GONE


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
@pytest.mark.parametrize("has_next", [False, True])
async def test_a_frame_whose_segment_was_given_up_is_late(transport: str, has_next: bool) -> None:
    """As a process that stood still finds it: what lies there now, maybe another transfer's, is never put into an
    answer. It is no damage either: the stream ends, the attempt stays, and another stream may bring the rest.
    """
    spec = scripted_spec("r", repeat=5, num_prompt_tokens=NUM_PROMPT_TOKENS)
    key = key_of("r")
    async with worker_pair(with_prefill=False) as pair:
        sender = RawSender(pair, spec, reserved := await pair.reserve(spec))
        assert (await sender.hello()).transport == transport
        push = await sender.open()
        await push.held()
        await push.send(sender.frames[:2])
        message = sender.message(3, sender.frames[2])
        assert sender.segment is not None
        if has_next:
            sender.segment.claim(TransferId(sender.target.transfer_id ^ 1), sender.incarnation)
        else:
            sender.segment.disclaim()
        await push.call.write(message)
        assert not isinstance(await push.call.read(), kv_pb2.PushDown)
        again = await sender.open()
        (held,) = await again.held()

        assert (held.token_start, held.token_end) == (0, 32)
        assert {RefusedKind.LATE_FRAME: 1} == refused(pair.decode.metrics)
        await again.send(sender.frames[2:])
        assert await sender.tell_first_token() is None
        gateway = await pair.gateway()
        await gateway.attach(key, reserved.attach_ticket)
        await gateway.ended(key)
        assert expected_ids(spec) == gateway.ids["r"]


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
async def test_a_segment_that_cannot_be_used_is_refused_before_any_frame(transport: str) -> None:
    """No such file, another transfer's, or a transport that is not offered: refused by name, the reservation stays."""
    spec = scripted_spec("r", repeat=5, num_prompt_tokens=NUM_PROMPT_TOKENS)
    async with worker_pair(with_prefill=False) as pair:
        sender = RawSender(pair, spec, reserved := await pair.reserve(spec))
        await sender.hello()
        for change in ("path", "transfer", "transport"):
            push = await sender.open(spoiled=change)
            assert await push.rejected() is RejectCode.NO_TRANSPORT
        push = await sender.open()
        await push.held()
        await push.send(sender.frames)
        assert await sender.tell_first_token() is None
        gateway = await pair.gateway()
        await gateway.attach(key_of("r"), reserved.attach_ticket)
        await gateway.ended(key_of("r"))

        assert expected_ids(spec) == gateway.ids["r"]
        assert {RefusedKind.STAGING: 3} == refused(pair.decode.metrics)


async def test_a_frame_outside_the_prompt_fails_the_attempt() -> None:
    """A range that does not belong to the sequence can only come from a broken sender."""
    spec = scripted_spec("r", num_prompt_tokens=NUM_PROMPT_TOKENS)
    async with worker_pair(with_prefill=False) as pair:
        sender = RawSender(pair, spec, await pair.reserve(spec))
        await sender.hello()
        push = await sender.open()
        await push.held()
        wrong = replace(sender.frames[0], token_start=8)
        await push.call.write(sender.message(1, wrong))

        assert await push.rejected() is RejectCode.BAD_RANGE
        await pair.scheduler.event("decode-0", key_of("r"), "attempt_failed")
        assert {RefusedKind.FRAME: 1} == refused(pair.decode.metrics)


@pytest.mark.parametrize("says", ["frame", "keep_alive"])
async def test_what_comes_after_the_end_is_refused_as_gone(says: str) -> None:
    """The next frame or sign of life on the open stream, a late opening and a first token: each is refused and counted."""
    spec = scripted_spec("r", num_prompt_tokens=NUM_PROMPT_TOKENS)
    async with worker_pair(with_prefill=False) as pair:
        sender = RawSender(pair, spec, await pair.reserve(spec))
        await sender.hello()
        push = await sender.open()
        await push.held()
        await push.send(sender.frames[:1])
        assert (await pair.release("decode-0", key_of("r"), abort=True)).blocks_freed > 0
        assert {} == refused(pair.decode.metrics)  # nothing has been late yet

        late_word = sender.message(2, sender.frames[1])
        await push.call.write(late_word if says == "frame" else kv_pb2.PushUp(keep_alive=kv_pb2.KeepAlive()))
        assert await push.rejected() is RejectCode.GONE
        late = await sender.open()
        assert await late.rejected() is RejectCode.GONE
        assert await sender.tell_first_token() is RejectCode.GONE
        assert {RefusedKind.LATE_TRANSFER: 3} == refused(pair.decode.metrics)


async def test_a_cancel_that_both_have_heard_of_is_nothing_late() -> None:
    """In mid-copy: decode lets go, the sender closes its stream without another word, and nothing is counted."""
    spec = scripted_spec("r", num_prompt_tokens=NUM_PROMPT_TOKENS)
    async with worker_pair(with_prefill=False) as pair:
        sender = RawSender(pair, spec, await pair.reserve(spec))
        await sender.hello()
        push = await sender.open()
        await push.held()
        await push.send(sender.frames[:1])
        assert (await pair.release("decode-0", key_of("r"), abort=True)).blocks_freed > 0
        await push.close()

        assert {} == refused(pair.decode.metrics)


async def test_token_1_of_an_attempt_that_ends_in_mid_copy_is_late() -> None:
    """Its row is still there, since a copy into its blocks has not returned; token 1 is not taken all the same."""
    memory = SlowMemory(8)
    spec = scripted_spec("a", num_prompt_tokens=NUM_PROMPT_TOKENS, max_tokens=20)
    async with worker_pair(with_prefill=False, decode_engine=scripted_engine(8, memory=memory)) as pair:
        sender = RawSender(pair, spec, await pair.reserve(spec))
        await sender.hello()
        push = await sender.open()
        await push.held()
        await push.call.write(sender.message(1, sender.frames[0]))
        while not memory.is_writing.is_set():
            await pair.scheduler.next_message()
        await aborted_in_mid_copy(pair)

        assert await sender.tell_first_token() is RejectCode.GONE
        assert await (await sender.open()).rejected() is RejectCode.GONE
        assert {RefusedKind.LATE_TRANSFER: 2} == refused(pair.decode.metrics)
        memory.may_write.set()
        await pair.scheduler.event("decode-0", key_of("a"), "released")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("sender", RejectCode.NO_HANDSHAKE),
        ("receiver", RejectCode.STALE_INCARNATION),
        ("transfer", RejectCode.UNKNOWN_TRANSFER),
        ("request", RejectCode.UNKNOWN_TRANSFER),
    ],
)
async def test_strangers_are_refused(change: str, expected: RejectCode) -> None:
    """Another start of either process, another transfer, another request: refused by name, the reservation stays."""
    spec = scripted_spec("r", num_prompt_tokens=NUM_PROMPT_TOKENS)
    async with worker_pair(with_prefill=False) as pair:
        sender = RawSender(pair, spec, await pair.reserve(spec))
        await sender.hello()
        match change:
            case "sender":
                sender.incarnation = Incarnation(1)
            case "receiver":
                sender.target.incarnation ^= 1
            case "transfer":
                sender.target.transfer_id ^= 1
            case _:
                sender.key = key_of("other")
        push = await sender.open()

        assert await push.rejected() is expected
        assert await sender.tell_first_token() is expected
        kind = RefusedKind.UNKNOWN_TRANSFER if change == "request" else RefusedKind.TRANSFER
        assert {kind: 2} == refused(pair.decode.metrics)
        assert (await pair.release("decode-0", key_of("r"), abort=True)).blocks_freed > 0


async def test_another_start_of_the_sender_cannot_take_a_transfer_over() -> None:
    """PDX-05: the first sender's start is the only one; a restarted prefill worker is told so and its frames not taken."""
    spec = scripted_spec("r", num_prompt_tokens=NUM_PROMPT_TOKENS)
    async with worker_pair(with_prefill=False) as pair:
        sender = RawSender(pair, spec, await pair.reserve(spec))
        await sender.hello()
        push = await sender.open()
        await push.held()
        sender.incarnation = Incarnation(9)
        await sender.hello()
        again = await sender.open()

        assert await again.rejected() is RejectCode.STALE_INCARNATION
        await push.call.write(sender.message(1, sender.frames[0]))
        assert await push.rejected() is RejectCode.STALE_INCARNATION
        assert {RefusedKind.TRANSFER: 1, RefusedKind.FRAME: 1} == refused(pair.decode.metrics)


async def test_a_broken_stream_is_opened_again_and_only_the_rest_is_sent() -> None:
    """The ranges that decode holds are named first; the answer is exact, and frames of the old stream are not taken."""
    spec = scripted_spec("r", repeat=5, num_prompt_tokens=NUM_PROMPT_TOKENS)
    key = key_of("r")
    async with worker_pair(with_prefill=False) as pair:
        sender = RawSender(pair, spec, reserved := await pair.reserve(spec))
        await sender.hello()
        first = await sender.open()
        await first.held()
        await first.send(sender.frames[:3])
        first.call.cancel()
        second = await sender.open()
        (held,) = await second.held()

        assert (held.token_start, held.token_end) == (0, 48)
        await second.send(sender.frames[3:])
        await second.close()
        assert await sender.tell_first_token() is None
        gateway = await pair.gateway()
        await gateway.attach(key, reserved.attach_ticket)
        await gateway.ended(key)
        assert expected_ids(spec) == gateway.ids["r"]


async def test_a_doubled_frame_is_acknowledged_counted_and_not_written() -> None:
    """What is held stays as it is, whatever comes for it."""
    spec = scripted_spec("r", repeat=5, num_prompt_tokens=NUM_PROMPT_TOKENS)
    key = key_of("r")
    async with worker_pair(with_prefill=False) as pair:
        sender = RawSender(pair, spec, reserved := await pair.reserve(spec))
        await sender.hello()
        push = await sender.open()
        await push.held()
        await push.send(sender.frames[:1])
        await push.call.write(sender.message(2, sender.frames[0], flip=True))
        assert 2 == (await push.down()).ack.upto
        assert {RefusedKind.DOUBLED_FRAME: 1} == refused(pair.decode.metrics)
        await push.send(sender.frames[1:], first_number=3)
        assert await sender.tell_first_token() is None
        gateway = await pair.gateway()
        await gateway.attach(key, reserved.attach_ticket)
        await gateway.ended(key)

        assert expected_ids(spec) == gateway.ids["r"]


async def test_a_newer_stream_replaces_one_that_is_still_open() -> None:
    """A sender that lost its stream without decode noticing opens another one; the old one's frames are refused."""
    spec = scripted_spec("r", num_prompt_tokens=NUM_PROMPT_TOKENS)
    async with worker_pair(with_prefill=False) as pair:
        sender = RawSender(pair, spec, await pair.reserve(spec))
        await sender.hello()
        first = await sender.open()
        await first.held()  # streams have no order among each other: which is the newer one is what decode hears later
        second = await sender.open()
        await second.held()
        await first.call.write(sender.message(1, sender.frames[0]))

        assert await first.rejected() is RejectCode.UNKNOWN_TRANSFER
        await second.send(sender.frames[:1])
        assert {RefusedKind.FRAME: 1} == refused(pair.decode.metrics)


async def test_blocks_are_given_out_again_only_after_their_copy_has_returned() -> None:
    """PDX-01: A is aborted while a copy of it runs; B, which needs A's blocks, gets them only when the copy is over."""
    memory = SlowMemory(8)
    a = scripted_spec("a", num_prompt_tokens=NUM_PROMPT_TOKENS, max_tokens=20)
    b = scripted_spec("b", ["x", "y"], repeat=4, num_prompt_tokens=NUM_PROMPT_TOKENS, max_tokens=20)
    async with worker_pair(with_prefill=False, decode_engine=scripted_engine(8, memory=memory)) as pair:
        sender = RawSender(pair, a, await pair.reserve(a))
        await sender.hello()
        push = await sender.open()
        await push.held()
        await push.call.write(sender.message(1, sender.frames[0]))
        while not memory.is_writing.is_set():
            await pair.scheduler.next_message()
        await pair.scheduler.send("decode-0", key_of("a"), abort=scheduler_pb2.Abort())
        await pair.ask(b)
        refused = (await pair.scheduler.event("decode-0", key_of("b"), "reserve_refused")).reserve_refused

        assert (refused.needed_blocks, refused.free_blocks) == (8, 0)
        assert [event.WhichOneof("event") for event in pair.scheduler.events("decode-0", key_of("a"))] == ["reserved"]
        memory.may_write.set()
        released = (await pair.scheduler.event("decode-0", key_of("a"), "released")).released
        assert released.blocks_freed == 8
        assert 1 == (await push.down()).ack.upto
        await push.call.write(sender.message(2, sender.frames[1]))
        assert await push.rejected() is RejectCode.GONE
        sender_b = RawSender(pair, b, reserved := await pair.reserve(b))
        push_b = await sender_b.open()
        await push_b.held()
        await push_b.send(sender_b.frames)
        assert await sender_b.tell_first_token() is None
        gateway = await pair.gateway()
        await gateway.attach(key_of("b"), reserved.attach_ticket)
        await gateway.ended(key_of("b"))
        assert expected_ids(b) == gateway.ids["b"]


@pytest.fixture
def without_collector() -> Generator[None]:
    """As in a process that is idle: whatever waits for the garbage collector stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def maps() -> str:
    """Of this process."""
    return Path("/proc/self/maps").read_text()


async def num_mapped() -> int:
    """Segments in its memory."""
    return sum(SEGMENT_NAME in line for line in maps().splitlines())


@pytest.mark.parametrize("transport", ["shm"], indirect=True)
@pytest.mark.parametrize("ends_by", ["abort", "sender", "both"])
@pytest.mark.usefixtures("without_collector")
async def test_a_segment_is_unmapped_behind_the_copy_that_was_its_last(transport: str, ends_by: str) -> None:
    """PDX-06: the attempt ends, or its sender gives the segment up, in the midst of a copy."""
    memory = SlowMemory(8)
    spec = scripted_spec("a", num_prompt_tokens=NUM_PROMPT_TOKENS, max_tokens=20)
    async with worker_pair(with_prefill=False, decode_engine=scripted_engine(8, memory=memory)) as pair:
        sender = RawSender(pair, spec, await pair.reserve(spec))
        assert (await sender.hello()).transport == transport
        before = await num_mapped()
        push = await sender.open()
        await push.held()
        assert before + 2 == await num_mapped()
        await push.call.write(sender.message(1, sender.frames[0]))
        while not memory.is_writing.is_set():
            await pair.scheduler.next_message()
        if ends_by != "abort":
            assert sender.segment is not None
            sender.segment.disclaim()
        if ends_by != "sender":
            await aborted_in_mid_copy(pair)
        memory.may_write.set()
        if ends_by == "abort":
            assert 1 == (await push.down()).ack.upto
            await push.close()
        await eventually(num_mapped, lambda now: now == before + 1, within_s=60.0, what="only the sender has it")


async def test_finish_while_kv_moves_ends_at_once() -> None:
    """The gateway saw a stop string in token 1: done with it, the stream is rejected, the blocks are free."""
    spec = scripted_spec("r", repeat=5, num_prompt_tokens=NUM_PROMPT_TOKENS, has_stop_strings=True)
    key = key_of("r")
    async with worker_pair(with_prefill=False) as pair:
        sender = RawSender(pair, spec, reserved := await pair.reserve(spec))
        await sender.hello()
        push = await sender.open()
        await push.held()
        await push.send(sender.frames[:2])
        await sender.tell_first_token()
        gateway = await pair.gateway()
        gateway.acks_at_once = False
        await gateway.attach(key, reserved.attach_ticket)
        await gateway.until(lambda: len(gateway.ids["r"]) == 1)
        await gateway.finish(key, 1)
        done = (await pair.scheduler.event("decode-0", key, "sequence_done")).sequence_done

        assert (done.finish_reason, done.completion_tokens) == (common_pb2.FINISH_REASON_STOP, 1)
        await push.call.write(sender.message(3, sender.frames[2]))
        assert await push.rejected() is RejectCode.GONE
        await pair.scheduler.idle("decode-0", 1024)


async def test_unlike_layouts_are_refused_at_the_handshake() -> None:
    """PDX-03: another block size, or other numerics, is named when the pair meets; a frame is never tried."""
    spec = scripted_spec("r", num_prompt_tokens=NUM_PROMPT_TOKENS)
    async with worker_pair(with_prefill=False) as pair:
        sender = RawSender(pair, spec, await pair.reserve(spec))
        for layout, expected in (
            (replace(sender.layout, block_size=32), "unlike KV layouts: block_size 32 and 16"),
            (replace(sender.layout, numerics=b"other"), "unlike KV layouts: numerics differ"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await sender.hello(layout)

            assert expected == serving_error(caught.value).message
        push = await sender.open()
        assert await push.rejected() is RejectCode.NO_HANDSHAKE
        assert {RefusedKind.HANDSHAKE: 2, RefusedKind.TRANSFER: 1} == refused(pair.decode.metrics)
