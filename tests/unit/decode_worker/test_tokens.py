"""What one token stream sends. Streams with a real gateway's other end: tests/contract/test_worker_pair.py."""

import asyncio
from typing import cast

from decode_worker.outbox import Outbox
from decode_worker.sequence import HeldSequence, Moments
from decode_worker.tokens import TokenStream
from shared.domain.ids import Attempt, Epoch, RequestId, RequestKey, TokenId, TransferId
from shared.domain.request import FinishReason, RequestSpec
from shared.domain.sampling import SamplingParams, TokenLogprobs
from shared.engine.executor import SampledToken
from shared.kv.block_table import BlockTable
from shared.kv.frames import FrameReceiver
from shared.wire import decode_pb2


def sequence(name: str, stream: TokenStream, *ids: int) -> HeldSequence:
    """A sequence that the stream reads, with these tokens in its outbox."""
    spec = RequestSpec(
        request_id=RequestId(name), prompt_ids=(TokenId(1),), max_tokens=99, sampling=SamplingParams(seed=1)
    )
    held = HeldSequence(
        key=RequestKey(spec.request_id, Attempt(1)),
        spec=spec,
        epoch=Epoch(1),
        transfer_id=TransferId(1),
        attach_ticket=b"t",
        block_table=BlockTable([], 16),
        tokens_held=0,
        delivered=(),
        receiver=cast(FrameReceiver, None),  # nothing is received here
        outbox=Outbox(capacity=16),
        moments=Moments(reserved_at=0),
        unattended_since=0,
        cached_tokens=3,
    )
    held.reader = stream
    add(held, *ids)
    return held


def add(held: HeldSequence, *ids: int) -> None:
    """Tokens come out of a step."""
    for token_id in ids:
        held.outbox.append(held.outbox.last_index + 1, SampledToken(token_id=TokenId(token_id)))
    assert held.reader is not None
    held.reader.touch(held)


def flat(batch: decode_pb2.TokenBatch) -> dict[str, tuple[int, list[int]]]:
    """Request -> first index and ids."""
    return {part.key.request_id: (part.first_index, list(part.ids)) for part in batch.sequences}


async def test_everything_since_the_last_write_goes_into_one_batch() -> None:
    """Several steps and several sequences while the stream was slow: one message, every token once."""
    stream = TokenStream()
    first, second = sequence("r1", stream, 11), sequence("r2", stream, 21)
    add(first, 12, 13)

    assert flat(await stream.next_batch()) == {"r1": (1, [11, 12, 13]), "r2": (1, [21])}
    add(second, 22)
    assert flat(await stream.next_batch()) == {"r2": (2, [22])}


async def test_what_a_failed_sequence_had_made_is_sent() -> None:
    """Taken at once: it goes out, once, though nobody reads the sequence any more and its outbox is gone."""
    stream = TokenStream()
    failing, other = sequence("r1", stream, 11, 12), sequence("r2", stream, 21)
    stream.flush(failing)
    failing.reader = None
    failing.outbox = Outbox(capacity=1)

    assert flat(await stream.next_batch()) == {"r1": (1, [11, 12]), "r2": (1, [21])}
    stream.flush(failing)
    add(other, 22)
    assert flat(await stream.next_batch()) == {"r2": (2, [22])}


async def test_the_end_is_sent_once_and_with_the_last_token() -> None:
    """And again only to who attaches again; `cached_tokens` goes with token 1."""
    stream = TokenStream()
    held = sequence("r", stream, 11)
    held.outbox.close(FinishReason.STOP)
    (part,) = (await stream.next_batch()).sequences
    assert (part.end.index, part.cached_tokens) == (1, 3)
    stream.touch(held)
    waiting = asyncio.timeout(0.02)
    try:
        async with waiting:
            await stream.next_batch()
    except TimeoutError:
        pass
    assert waiting.expired()
    held.next_unsent, held.is_end_sent = 2, False
    stream.touch(held)
    (again,) = (await stream.next_batch()).sequences

    assert (list(again.ids), again.end.index, again.cached_tokens) == ([], 1, 0)


async def test_a_stream_that_was_replaced_sends_nothing_of_the_sequence() -> None:
    """Another stream reads it by now; what this one had noted is not its to send."""
    old, new = TokenStream(), TokenStream()
    held = sequence("r", old, 11)
    other = sequence("other", old, 21)
    held.reader = new
    new.touch(held)

    assert flat(await old.next_batch()) == {other.key.request_id: (1, [21])}
    assert flat(await new.next_batch()) == {"r": (1, [11])}


async def test_tokens_that_a_finish_took_are_not_read_again() -> None:
    """Finish empties the outbox beyond what was sent: only the end remains to be said."""
    stream = TokenStream()
    held = sequence("r", stream, 11, 12, 13)
    held.outbox.finish(2, FinishReason.STOP)
    (part,) = (await stream.next_batch()).sequences

    assert (list(part.ids), part.end.index) == ([], 2)


async def test_log_probabilities_go_with_their_tokens() -> None:
    """One a token where they were asked for, none at all where not."""
    stream = TokenStream()
    plain, asked = sequence("plain", stream, 11), sequence("asked", stream)
    for index in (1, 2):
        logprobs = TokenLogprobs(logprob=-0.5 * index, top=((TokenId(7), -0.5), (TokenId(8), -1.5)))
        asked.take(index, SampledToken(token_id=TokenId(20 + index), logprobs=logprobs), None)
    asked.touch_reader()
    parts = {part.key.request_id: part for part in (await stream.next_batch()).sequences}

    assert list(parts[plain.key.request_id].logprobs) == []
    assert [(told.logprob, list(told.top_ids), list(told.top_logprobs)) for told in parts["asked"].logprobs] == [
        (-0.5, [7, 8], [-0.5, -1.5]),
        (-1.0, [7, 8], [-0.5, -1.5]),
    ]
