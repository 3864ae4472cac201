"""An answer across cut connections, and its three ends."""

from collections import deque
from collections.abc import Generator

import pytest

from cli.client import Client
from cli.client_answer import Answer
from cli.client_link import AnswerCut, AnswerFailed, Retries
from shared.domain.request import Usage
from tests.support.fake_gateway import (
    REQUEST_ID,
    FakeGateway,
    Refusal,
    Said,
    delta,
    failure,
    fake_gateway,
    finish,
)

ANSWER = [
    Said(data={"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
    delta("Hä", 1),
    delta("ß ", 3),
    delta("鸡🐔", 4),
    delta("\u2028!", 6),
    *finish(),
]
TEXT = "Häß 鸡🐔\u2028!"
RESUME = f"GET /v1/streams/{REQUEST_ID}"
CANCEL = f"DELETE /v1/requests/{REQUEST_ID}"


@pytest.fixture
def waits() -> list[float]:
    """The pauses that were made."""
    return []


@pytest.fixture
def gateway() -> Generator[FakeGateway]:
    """Gives ANSWER."""
    with fake_gateway(ANSWER) as running:
        yield running


@pytest.fixture
def client(gateway: FakeGateway, waits: list[float]) -> Generator[Client]:
    """That makes no real pause."""
    with Client(gateway.url, wait=waits.append) as made:
        yield made


def _behind(num_events: int) -> int:
    """Bytes of the first events of ANSWER."""
    return sum(len(said.bytes()) for said in ANSWER[:num_events])


def _ask(client: Client) -> Answer:
    return client.ask([{"role": "user", "content": "?"}])


@pytest.mark.parametrize(("has_length", "step"), [(True, 1), (False, 7)], ids=["chunked", "until the connection ends"])
def test_the_text_is_the_uncut_one_wherever_it_is_cut(
    gateway: FakeGateway, client: Client, has_length: bool, step: int
) -> None:
    """At every byte: between events, inside one, inside a character, before the first and behind the last."""
    gateway.has_length = has_length
    for place in range(0, len(gateway.body(None)), step):
        gateway.cuts = deque([place])
        with _ask(client) as answer:
            pieces = list(answer)
        assert (TEXT, TEXT, "stop", 6) == ("".join(pieces), answer.text, answer.finish_reason, answer.token_index)
    assert CANCEL not in gateway.lines


def test_every_connection_may_be_cut(gateway: FakeGateway, client: Client, waits: list[float]) -> None:
    """Each brings some; each is resumed behind what was got, and the pause starts short again."""
    gateway.cuts = deque([_behind(2), *[_behind(i + 1) - _behind(i) for i in (2, 3, 4)]])

    text = "".join(answer := _ask(client))

    assert TEXT == text
    assert 4 == answer.num_resumed == len(waits)
    assert ["1", "3", "4", "6"] == [asked.headers["last-event-id"] for asked in gateway.asked if asked.line == RESUME]
    assert max(waits) <= 0.1


def test_a_finished_answer_has_its_usage(client: Client) -> None:
    """As the last chunk tells it."""
    with _ask(client) as answer:
        text = "".join(answer)

    assert (TEXT, "stop", 0) == (text, answer.finish_reason, answer.num_resumed)
    assert Usage(prompt_tokens=7, completion_tokens=3, cached_tokens=2) == answer.usage


def test_a_cut_behind_the_last_word_is_no_cut(gateway: FakeGateway, client: Client) -> None:
    """The text is whole; only the usage is not known."""
    gateway.cuts = deque([_behind(len(ANSWER) - 2)])

    with _ask(client) as answer:
        text = "".join(answer)

    assert (TEXT, "stop", None) == (text, answer.finish_reason, answer.usage)
    assert ["POST /v1/chat/completions"] == gateway.lines


def test_text_without_a_new_id_is_not_doubled(gateway: FakeGateway, client: Client) -> None:
    """What was held back comes at the end under the id that was there: behind a cut it comes again."""
    gateway.answer = [delta("a", 1), delta("b<", 1), delta("c"), delta("d", 2), delta("e", 2), *finish("length")]
    for place in range(0, len(gateway.body(None)), 5):
        gateway.cuts = deque([place])
        with _ask(client) as answer:
            assert "ab<cde" == "".join(answer), f"cut at byte {place}"


def test_a_failure_is_told_and_not_resumed(gateway: FakeGateway, client: Client) -> None:
    """The text so far stays; nothing is to be cancelled."""
    gateway.answer = [delta("a", 1), *failure("worker_lost")]

    with pytest.raises(AnswerFailed) as caught, _ask(client) as answer:
        list(answer)

    assert ("worker_lost", "it failed", None) == (caught.value.code, caught.value.message, caught.value.status)
    assert ("a", None) == (answer.text, answer.finish_reason)
    assert ["POST /v1/chat/completions"] == gateway.lines


def test_whoever_is_superseded_does_not_take_it_back(gateway: FakeGateway, client: Client) -> None:
    """Otherwise two readers would take it from each other for ever; and it is not the older one's to cancel."""
    gateway.answer = [delta("a", 1), *failure("superseded")]

    with pytest.raises(AnswerFailed) as caught, _ask(client) as answer:
        list(answer)

    assert "superseded" == caught.value.code
    assert ["POST /v1/chat/completions"] == gateway.lines


def test_what_cannot_be_resumed_was_cut(gateway: FakeGateway, client: Client, waits: list[float]) -> None:
    """After so many tries without one token more, the last at full length; nothing says that it failed."""
    gateway.cuts = deque([_behind(2)])
    gateway.refusals = deque([None, *[Refusal(status=503, code="state_unavailable")] * 10])

    with pytest.raises(AnswerCut) as caught, _ask(client) as answer:
        list(answer)

    assert (REQUEST_ID, 1) == (caught.value.request_id, caught.value.token_index)
    assert "refused" in caught.value.message
    assert 10 == gateway.lines.count(RESUME) == len(waits)
    assert 2.5 <= waits[-1] <= 5.0
    assert CANCEL not in gateway.lines


def test_connections_without_progress_are_counted(gateway: FakeGateway, client: Client) -> None:
    """One that opens and brings no token more is a try like any other."""
    gateway.cuts = deque([_behind(2), *[10] * 20])

    with pytest.raises(AnswerCut), _ask(client) as answer:
        list(answer)

    assert (10, "Hä") == (gateway.lines.count(RESUME), answer.text)


def test_an_answer_that_nobody_knows_was_cut(gateway: FakeGateway, client: Client) -> None:
    """Too old, or of another key: trying on would not help."""
    gateway.cuts = deque([_behind(2)])
    gateway.refusals = deque([None, Refusal(status=404, code="request_not_found")])

    with pytest.raises(AnswerCut, match="refused"), _ask(client) as answer:
        list(answer)

    assert 1 == gateway.lines.count(RESUME)


def test_a_refused_resume_may_be_a_failure(gateway: FakeGateway, client: Client) -> None:
    """The server's word about the answer."""
    gateway.cuts = deque([_behind(2)])
    gateway.refusals = deque([None, Refusal(status=500, code="request_poisoned")])

    with pytest.raises(AnswerFailed) as caught:
        list(_ask(client))

    assert ("request_poisoned", 500) == (caught.value.code, caught.value.status)


def test_another_server_s_answer_is_not_resumed(gateway: FakeGateway, client: Client) -> None:
    """Without our header there is no id to resume; leaving it asks for no cancel either."""
    gateway.is_plain = True
    gateway.cuts = deque([_behind(2)])

    with pytest.raises(AnswerCut) as caught, _ask(client) as answer:
        list(answer)

    assert caught.value.request_id is None
    assert ["POST /v1/chat/completions"] == gateway.lines


@pytest.mark.parametrize("data", ["no json", "[DONE]"])
def test_a_stream_that_makes_no_sense_is_no_finished_answer(gateway: FakeGateway, client: Client, data: str) -> None:
    """What is not JSON is a failure; an end without a reason is a cut, and resumed until the tries are used up."""
    gateway.answer = [delta("a", 1), Said(data=data)]

    with pytest.raises((AnswerFailed, AnswerCut)) as caught:
        list(_ask(client))

    assert (AnswerFailed if data == "no json" else AnswerCut) is caught.type


def test_leaving_the_block_cancels(gateway: FakeGateway, client: Client) -> None:
    """Once, whatever the reason was."""
    with _ask(client) as answer:
        next(answer)

    assert ["POST /v1/chat/completions", CANCEL] == gateway.lines

    with pytest.raises(KeyError), _ask(client) as answer:
        raise KeyError(next(answer))

    assert [CANCEL] * 2 == [line for line in gateway.lines if line == CANCEL]


def test_a_cancel_that_cannot_be_told_hides_nothing(gateway: FakeGateway, client: Client) -> None:
    """Leaving the block tries; the explicit call says that it did not work."""
    gateway.refusals = deque([None, Refusal(status=500, code="internal_error")])
    with pytest.raises(KeyError), _ask(client):
        raise KeyError

    gateway.refusals = deque([None, Refusal(status=500, code="internal_error")])
    answer = _ask(client)
    with pytest.raises(AnswerFailed):
        answer.cancel()


def test_letting_go_cancels_nothing(gateway: FakeGateway, client: Client) -> None:
    """Somebody else may resume it: the rest is theirs."""
    with _ask(client) as answer:
        first = next(answer)
        answer.close()

    assert [] == list(answer)
    with client.resume(REQUEST_ID, after=answer.token_index) as rest:
        assert TEXT == first + "".join(rest)
    assert ["POST /v1/chat/completions", RESUME] == gateway.lines


def test_resuming_is_tried_again_too(gateway: FakeGateway, client: Client) -> None:
    """The gateway may be away when somebody comes back."""
    gateway.refusals = deque([Refusal(status=0), Refusal(status=502), None])

    with client.resume(REQUEST_ID, after=3) as answer:
        assert "鸡🐔\u2028!" == "".join(answer)


def test_the_other_gateway_goes_on(gateway: FakeGateway, waits: list[float]) -> None:
    """One of two is away for good: its answer is resumed at the other."""
    with (
        fake_gateway(ANSWER, cuts=deque([_behind(2)])) as first,
        Client(first.url, gateway.url, wait=waits.append) as client,
    ):
        first.refusals = deque([None, *[Refusal(status=0)] * 5])
        answer = _ask(client)
        assert TEXT == "".join(answer)

    assert [RESUME] == gateway.lines
    assert [RESUME] == first.lines[1:]


def test_no_retries_is_a_choice(gateway: FakeGateway) -> None:
    """Then the first cut is the last."""
    gateway.cuts = deque([_behind(2)])
    with Client(gateway.url, retries=Retries(resume=0)) as client, pytest.raises(AnswerCut) as caught:
        list(_ask(client))

    assert 1 == caught.value.token_index
