"""A sequence of the decode worker: what follows from its state."""

import pytest

from decode_worker.outbox import Outbox
from decode_worker.reservations import Reservation
from decode_worker.sequence import HeldSequence, Stage, hold
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, BlockId, Epoch, Incarnation, RequestId, RequestKey, TokenId, TransferId
from shared.domain.request import FinishReason, RequestSpec, SequenceState
from shared.domain.sampling import SamplingParams
from shared.engine.executor import SampledToken
from shared.kv.frames import FrameHeader, FrameRange, RejectCode
from shared.kv.layout import KvLayout

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_size=4, numerics=b"n")
EOS = TokenId(2)


@pytest.fixture
def row() -> HeldSequence:
    """Four prompt tokens, three to come, reserved at 100 s."""
    spec = RequestSpec(
        request_id=RequestId("r"),
        prompt_ids=tuple(TokenId(token) for token in range(4)),
        max_tokens=3,
        sampling=SamplingParams(seed=1),
    )
    granted = Reservation(
        key=RequestKey(spec.request_id, Attempt(1)),
        transfer_id=TransferId(6),
        attach_ticket=b"ticket",
        blocks=(BlockId(8), BlockId(3)),
        num_shared=0,
        last_sign_at=100.0,
    )
    return hold(
        spec,
        granted,
        delivered=(),
        epoch=Epoch(1),
        layout=LAYOUT,
        incarnation=Incarnation(9),
        outbox=Outbox(capacity=4),
        now=100.0,
    )


def test_a_new_row_holds_what_was_granted(row: HeldSequence) -> None:
    """Waiting for KV, into its own blocks, under its own transfer."""
    assert row.block_table.block_ids == (8, 3)
    assert (row.transfer_id, row.attach_ticket) == (6, b"ticket")
    assert row.sequence_state is SequenceState.WAITING_KV
    assert not row.receiver.is_complete


@pytest.mark.parametrize(
    ("token_id", "max_tokens", "expected"), [(50, 3, None), (EOS, 3, FinishReason.STOP), (50, 1, FinishReason.LENGTH)]
)
def test_token_1_may_be_the_last(
    row: HeldSequence, token_id: int, max_tokens: int, expected: FinishReason | None
) -> None:
    """By the end token, or because only one was asked for."""
    row.spec = RequestSpec(
        request_id=row.spec.request_id,
        prompt_ids=row.spec.prompt_ids,
        max_tokens=max_tokens,
        sampling=row.spec.sampling,
    )

    assert row.take_first(SampledToken(token_id=TokenId(token_id)), 2, frozenset({EOS})) is expected
    assert (row.first_token, row.cached_tokens) == (SampledToken(token_id=TokenId(token_id)), 2)
    assert (row.outbox.end is not None) == (expected is not None)


def test_settled_means_ended_and_untouched(row: HeldSequence) -> None:
    """Neither a step nor a copy may be under way."""
    assert (
        row.receiver.open(
            key=row.key,
            transfer_id=TransferId(6),
            sender_incarnation=Incarnation(1),
            receiver_incarnation=Incarnation(9),
        )
        == ()
    )
    row.receiver.accept(
        FrameHeader(
            number=1,
            key=row.key,
            transfer_id=TransferId(6),
            sender_incarnation=Incarnation(1),
            range=FrameRange(layer_start=0, layer_end=1, token_start=0, token_end=4),
            crc32=0,
        ),
        payload_crc32=0,
        num_payload_bytes=LAYOUT.block_bytes,
    )
    seen = [row.is_settled]
    row.stage = Stage.ENDED
    row.is_in_engine = True
    seen.append(row.is_settled)
    row.is_in_engine = False
    seen.append(row.is_settled)
    row.receiver.copied(1)
    seen.append(row.is_settled)

    assert seen == [False, False, False, True]


def test_why_no_more_kv_is_taken(row: HeldSequence) -> None:
    """Gone for an ordinary end, a fault where we failed it."""
    assert row.reject_code is RejectCode.GONE
    row.error = ServingError(ErrorCode.INTERNAL, "internal error")

    assert row.reject_code is RejectCode.FAULT


def test_phases_are_measured_as_far_as_they_were_reached(row: HeldSequence) -> None:
    """Until token 1, from it to the commit, and decoding."""
    row.moments.first_token_at = 100.2
    assert row.phases_ms() == {"receive_ms": 200}
    row.moments.committed_at = 100.25
    row.moments.ended_at = 101.25

    assert row.phases_ms() == {
        "receive_ms": 200,
        "transfer_exposed_ms": 50,
        "decode_ms": 1000,
        "total_ms": 1250,
    }
