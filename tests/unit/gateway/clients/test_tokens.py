"""A subscription's memory: what came, and what the present call must still be told. The streams are in test_session.py."""

from gateway.clients.tokens import (
    ACK_TOKENS,
    MAX_UNTAKEN_TOKENS,
    AttachRefused,
    SequenceEnded,
    TokensArrived,
    TokenStream,
    TokenSubscription,
)
from shared.codec.request import logprobs_to_wire
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, RequestId, RequestKey, TokenId
from shared.domain.request import FinishReason
from shared.domain.sampling import TokenLogprobs
from shared.wire import common_pb2, decode_pb2

KEY = RequestKey(RequestId("R"), Attempt(1))
WIRE_KEY = common_pb2.RequestKey(request_id="R", attempt=1)


class SilentStream(TokenStream):
    """Remembers that it was woken."""

    def __init__(self) -> None:
        self.num_wakes = 0
        self.num_later = 0

    def wake_later(self) -> None:
        """An acknowledgement that may wait."""
        self.num_later += 1

    def wake(self) -> None:
        """One more."""
        self.num_wakes += 1


def subscription(from_index: int = 1) -> TokenSubscription:
    """One that no stream reads."""
    return TokenSubscription(SilentStream(), KEY, b"ticket", from_index)


def tokens(first_index: int, *ids: int, end: int | None = None, cached: int = 0) -> decode_pb2.SequenceTokens:
    """A message of decode's."""
    message = decode_pb2.SequenceTokens(key=WIRE_KEY, first_index=first_index, ids=ids, cached_tokens=cached)
    if end is not None:
        message.end.CopyFrom(decode_pb2.End(index=end, reason=common_pb2.FINISH_REASON_LENGTH))
    return message


def arrived(*ids: int, cached: int = 0) -> TokensArrived:
    """What a reader gets."""
    return TokensArrived(ids=tuple(map(TokenId, ids)), cached_tokens=cached)


def told(subject: TokenSubscription) -> list[str]:
    """Kinds and numbers of what is still to be told."""
    words: list[str] = []
    for message in subject.untold():
        match message.WhichOneof("message"):
            case "attach":
                words.append(f"attach {message.attach.from_index}")
            case "ack":
                words.append(f"ack {message.ack.index}")
            case "finish":
                words.append(f"finish {message.finish.index}")
            case other:
                words.append(str(other))
    return words


async def test_tokens_come_once_and_in_order() -> None:
    """What was sent again is dropped, also where it overlaps with something new; all that is there comes as one."""
    subject = subscription()
    subject.receive(tokens(1, 10, 11, cached=16))
    subject.receive(tokens(1, 10, 11))
    assert arrived(10, 11, cached=16) == await subject.get()
    subject.receive(tokens(2, 11, 12))
    subject.receive(tokens(4, 13))
    assert arrived(12, 13) == await subject.get()
    assert 5 == subject.next_index


async def test_log_probabilities_stay_with_their_tokens() -> None:
    """Also where the first of a message were there before."""
    subject = subscription()
    values = [TokenLogprobs(logprob=-0.5 * place, top=((TokenId(place), -0.25),)) for place in range(3)]
    for count, first in ((2, 0), (3, 0)):
        message = tokens(1, *range(10, 10 + count))
        message.logprobs.extend(map(logprobs_to_wire, values[first:count]))
        subject.receive(message)

    ids = (TokenId(10), TokenId(11), TokenId(12))
    assert TokensArrived(ids=ids, cached_tokens=0, logprobs=tuple(values)) == await subject.get()


async def test_a_gap_is_asked_for_again() -> None:
    """Nothing beyond it is taken."""
    subject = subscription()
    assert ["attach 1"] == told(subject)
    subject.receive(tokens(1, 10))
    subject.receive(tokens(3, 12))

    assert ["attach 2"] == told(subject)
    assert 2 == subject.next_index


async def test_the_end_comes_after_the_last_token() -> None:
    """In the same message, or alone when the tokens were there before."""
    together, alone = subscription(), subscription()
    together.receive(tokens(1, 10, end=1))
    alone.receive(tokens(1, 10))
    alone.receive(tokens(1, 10, end=1))

    for subject in (together, alone):
        assert arrived(10) == await subject.get()
        assert SequenceEnded(index=1, reason=FinishReason.LENGTH) == await subject.get()


async def test_only_the_newest_acknowledgement_is_told() -> None:
    """However many there were; an older one is no news."""
    subject = subscription()
    told(subject)
    subject.receive(tokens(1, *range(5)))
    for index in (1, 3, 2):
        subject.ack(index)

    assert ["ack 3"] == told(subject)
    assert [] == told(subject)


async def test_an_acknowledgement_waits_for_others() -> None:
    """Until there are many, or the answer has its end; the writer tells it at once only when its time has come."""
    stream = SilentStream()
    subject = TokenSubscription(stream, KEY, b"ticket", 1)
    told(subject)
    subject.receive(tokens(1, *range(ACK_TOKENS + 1)))

    subject.ack(ACK_TOKENS - 1)
    assert (0, 1) == (stream.num_wakes, stream.num_later)
    assert [] == list(subject.untold(with_acks=False))
    subject.ack(ACK_TOKENS)
    assert (1, 1) == (stream.num_wakes, stream.num_later)
    assert [ACK_TOKENS] == [message.ack.index for message in subject.untold(with_acks=False)]

    subject.receive(tokens(ACK_TOKENS + 2, end=ACK_TOKENS + 1))
    subject.ack(ACK_TOKENS + 1)
    assert (2, 1) == (stream.num_wakes, stream.num_later)
    assert [ACK_TOKENS + 1] == [message.ack.index for message in subject.untold(with_acks=False)]


async def test_where_decode_has_little_room_each_acknowledgement_is_told_at_once() -> None:
    """With stop strings it computes four tokens ahead."""
    stream = SilentStream()
    subject = TokenSubscription(stream, KEY, b"ticket", 1, acks_at_once=True)
    told(subject)
    subject.receive(tokens(1, 10, 11))
    subject.ack(1)

    assert (1, 0) == (stream.num_wakes, stream.num_later)
    assert [1] == [message.ack.index for message in subject.untold(with_acks=False)]


async def test_a_new_call_is_told_everything_again() -> None:
    """From the next wanted token on; what was acknowledged stays acknowledged."""
    subject = subscription()
    subject.receive(tokens(1, 10, 11, 12))
    subject.ack(2)
    told(subject)
    subject.forget_told()

    assert ["attach 4", "ack 2"] == told(subject)


async def test_the_last_acknowledgement_survives_a_broken_call() -> None:
    """After the end decode still waits for it."""
    subject = subscription()
    subject.receive(tokens(1, 10, end=1))
    told(subject)
    subject.forget_told()
    subject.ack(1)

    assert ["attach 2", "ack 1"] == told(subject)


async def test_finish_takes_the_place_of_acknowledgements_and_is_repeated() -> None:
    """And nothing that comes later is taken."""
    subject = subscription()
    told(subject)
    subject.receive(tokens(1, 10, 11))
    subject.finish(2, FinishReason.STOP)
    subject.receive(tokens(3, 12))
    subject.ack(1)

    assert ["finish 2"] == told(subject)
    assert 3 == subject.next_index
    subject.forget_told()
    assert ["attach 3", "finish 2"] == told(subject)


async def test_a_late_refusal_is_of_the_session_that_asked() -> None:
    """An older reader of the same answer was here, and its attach came too late: the newer one goes on."""
    subject = TokenSubscription(SilentStream(), KEY, b"ticket", 1, 4)
    subject.refuse(ServingError(ErrorCode.SUPERSEDED, "a newer reader took over"), 2)
    subject.receive(tokens(1, 10))
    assert (arrived(10), ["attach 2"]) == (await subject.get(), told(subject))


async def test_a_refused_subscription_says_no_more() -> None:
    """Neither to the reader nor to decode."""
    subject = subscription()
    error = ServingError(ErrorCode.REQUEST_NOT_FOUND, "no such attempt")
    subject.refuse(error, 0)
    subject.refuse(error, 0)
    subject.receive(tokens(1, 10))
    subject.forget_told()

    assert AttachRefused(error=error) == await subject.get()
    assert [] == told(subject)
    assert 1 == subject.next_index


async def test_the_outcome_can_conclude_it() -> None:
    """Behind what has come; an end that was there stays the only one."""
    subject = subscription()
    subject.receive(tokens(1, 10))
    subject.conclude(FinishReason.STOP)
    subject.conclude(FinishReason.LENGTH)

    assert arrived(10) == await subject.get()
    assert SequenceEnded(index=1, reason=FinishReason.STOP) == await subject.get()


async def test_a_peer_without_a_bound_is_cut_off() -> None:
    """Far more untaken tokens than any outbox has."""
    subject = subscription()
    subject.receive(tokens(1, *range(MAX_UNTAKEN_TOKENS + 1)))

    assert isinstance(await subject.get(), TokensArrived)
    assert isinstance(await subject.get(), AttachRefused)


async def test_a_later_start_counts_what_was_held_as_acknowledged() -> None:
    """Tokens that another stream brought."""
    subject = subscription(from_index=5)

    assert ["attach 5", "ack 4"] == told(subject)
