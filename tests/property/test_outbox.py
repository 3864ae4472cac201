"""Whatever the order of events, a reader that follows the rules gets every token once and in order."""

from hypothesis import given
from hypothesis import strategies as st

from decode_worker.outbox import Outbox
from shared.domain.ids import TokenId
from shared.domain.request import FinishReason
from shared.engine.executor import SampledToken

ACTIONS = st.lists(st.sampled_from(["compute", "read", "ack", "reattach"]), max_size=200)


@given(actions=ACTIONS, capacity=st.integers(1, 6), answer=st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_nothing_is_lost_doubled_or_reordered(actions: list[str], capacity: int, answer: list[int]) -> None:
    """The reader's tokens are always a prefix of the answer, held tokens never exceed the capacity, and the end is reached."""
    outbox = Outbox(capacity=capacity)
    received: list[int] = []
    next_unsent = 1
    for action in [*actions, *["compute", "read", "ack"] * len(answer)]:
        match action:
            case "compute":
                index = outbox.last_index + 1
                if index <= min(outbox.may_compute_upto, len(answer)):
                    outbox.append(index, SampledToken(token_id=TokenId(answer[index - 1])))
                    if index == len(answer):
                        outbox.close(FinishReason.LENGTH)
            case "read":
                received += (token.token_id for token in outbox.read(next_unsent))
                next_unsent = outbox.last_index + 1
            case "ack":
                outbox.ack(len(received))
            case _:  # a broken stream loses what was not acknowledged, the new one asks for it again
                del received[outbox.acked_upto :]
                next_unsent = len(received) + 1
        assert len(outbox) <= capacity
        assert received == answer[: len(received)]

    assert outbox.is_done
    assert received == answer
