"""The outbox holds tokens by index until they are acknowledged."""

import pytest

from decode_worker.outbox import Outbox, OutboxEnd, outbox_capacity
from shared.domain.ids import TokenId
from shared.domain.request import FinishReason
from shared.engine.executor import SampledToken


def token(token_id: int) -> SampledToken:
    """Without log probabilities."""
    return SampledToken(token_id=TokenId(token_id))


def held(outbox: Outbox, from_index: int) -> list[int]:
    """The ids of what is held."""
    return [each.token_id for each in outbox.read(from_index)]


def filled(*ids: int, capacity: int = 8) -> Outbox:
    """An outbox that holds these tokens from index 1 on."""
    outbox = Outbox(capacity=capacity)
    for index, token_id in enumerate(ids, start=1):
        outbox.append(index, token(token_id))
    return outbox


def test_tokens_stay_until_they_are_acknowledged() -> None:
    """Reading takes nothing out; an acknowledgement does, and what has left cannot be read again."""
    outbox = filled(11, 12, 13)

    assert held(outbox, 1) == [11, 12, 13]
    assert held(outbox, 2) == [12, 13]
    assert outbox.ack(2)
    assert held(outbox, 3) == [13]
    assert held(outbox, 4) == []
    with pytest.raises(ValueError, match="has left"):
        outbox.read(2)


def test_credit_moves_with_acknowledgements() -> None:
    """The engine may compute `capacity` tokens beyond the last acknowledged one, never more."""
    outbox = filled(1, 2, capacity=2)

    assert outbox.may_compute_upto == 2
    with pytest.raises(ValueError, match="beyond the credit"):
        outbox.append(3, token(3))
    assert outbox.ack(1)
    assert outbox.may_compute_upto == 3
    outbox.append(3, token(3))
    assert len(outbox) == 2


@pytest.mark.parametrize("index", [0, 1, 4])
def test_an_acknowledgement_that_is_no_news_changes_nothing(index: int) -> None:
    """Repeated, old and impossible acknowledgements are told apart from real ones."""
    outbox = filled(1, 2, 3)
    outbox.ack(1)

    assert not outbox.ack(index)
    assert outbox.acked_upto == 1


def test_tokens_come_in_order_and_never_after_the_end() -> None:
    """A gap, a repeat, or a token after the last one is a bug of the caller."""
    outbox = filled(1)

    for index in (1, 3):
        with pytest.raises(ValueError, match="token"):
            outbox.append(index, token(0))
    outbox.close(FinishReason.LENGTH)
    with pytest.raises(ValueError, match="after the end"):
        outbox.append(2, token(0))
    with pytest.raises(ValueError, match="ends once"):
        outbox.close(FinishReason.STOP)


def test_done_means_ended_and_empty() -> None:
    """An ended answer with tokens still held is not done: they could still be asked for."""
    outbox = filled(1, 2)
    outbox.close(FinishReason.STOP)

    assert not outbox.is_done
    assert outbox.ack(2)
    assert outbox.is_done
    assert outbox.end == OutboxEnd(index=2, reason=FinishReason.STOP)


def test_finish_acknowledges_all_and_drops_what_lies_beyond() -> None:
    """The reader's word on where the answer ends wins over what was computed; a repeat changes nothing."""
    outbox = filled(1, 2, 3)

    for _ in range(2):
        outbox.finish(2, FinishReason.STOP)

        assert outbox.is_done
        assert outbox.end == OutboxEnd(index=2, reason=FinishReason.STOP)
        assert outbox.last_index == 3


@pytest.mark.parametrize("index", [0, 4])
def test_finish_beyond_what_was_made_is_refused(index: int) -> None:
    """An answer cannot have more tokens than were computed, nor none."""
    with pytest.raises(ValueError, match="were made"):
        filled(1, 2, 3).finish(index, FinishReason.STOP)


@pytest.mark.parametrize(
    ("max_tokens", "max_bytes", "has_stop_strings", "expected"),
    [(256, 65536, False, 256), (256, 64, False, 16), (256, 65536, True, 4), (2, 65536, True, 2), (256, 1, False, 1)],
)
def test_capacity_is_the_tightest_bound(max_tokens: int, max_bytes: int, has_stop_strings: bool, expected: int) -> None:
    """Tokens, bytes and, with stop strings, four tokens ahead; at least one, or nothing would ever move."""
    assert expected == outbox_capacity(max_tokens=max_tokens, max_bytes=max_bytes, has_stop_strings=has_stop_strings)


@pytest.mark.parametrize(("top_logprobs", "expected"), [(None, 252), (0, 126), (1, 63), (20, 6)])
def test_log_probabilities_take_room(top_logprobs: int | None, expected: int) -> None:
    """1,008 bytes: 4 a token, 4 for its own logarithm, 8 for each alternative."""
    capacity = outbox_capacity(max_tokens=256, max_bytes=1008, has_stop_strings=False, top_logprobs=top_logprobs)

    assert expected == capacity


def test_a_continued_answer_begins_behind_what_is_delivered() -> None:
    """Those tokens are not held: the next one has the next index, and the credit counts from there."""
    outbox = Outbox(capacity=2, num_delivered=5)
    assert (outbox.last_index, outbox.acked_upto, outbox.may_compute_upto) == (5, 5, 7)
    outbox.append(6, token(1))

    assert held(outbox, 6) == [1]
    with pytest.raises(ValueError, match="has left"):
        outbox.read(5)


def test_a_capacity_below_one_is_refused() -> None:
    """An outbox without room would hold its sequence for ever."""
    with pytest.raises(ValueError, match="at least 1"):
        Outbox(capacity=0)
