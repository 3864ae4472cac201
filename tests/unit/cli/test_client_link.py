"""One try after another, at one gateway after another."""

from collections import deque
from collections.abc import Generator

import pytest

from cli.client_link import AnswerCut, AnswerFailed, Link, Retries, TryAgain, failure_of
from tests.support.fake_gateway import FakeGateway, Refusal, delta, fake_gateway, finish

DRAINING = Refusal(status=503, code="draining", headers={"retry-after": "1"})
PROXY = Refusal(status=502)
CUT = Refusal(status=0)


@pytest.fixture
def gateway() -> Generator[FakeGateway]:
    """With one short answer."""
    with fake_gateway([delta("x", 1), *finish()]) as running:
        yield running


def _link(*urls: str, waits: list[float] | None = None, **retries: float) -> Link:
    return Link(
        urls,
        retries=Retries(**retries),  # pyright: ignore[reportArgumentType] - numbers as they are
        wait=([] if waits is None else waits).append,
    )


@pytest.mark.parametrize(
    ("refusal", "may_have_begun"),
    [(DRAINING, False), (Refusal(status=429, code="overloaded"), False), (PROXY, True), (CUT, True)],
)
def test_what_may_be_tried_again(gateway: FakeGateway, refusal: Refusal, may_have_begun: bool) -> None:
    """A refusal began nothing; behind a broken connection or a proxy's error the request may run."""
    gateway.refusals = deque([refusal])

    with pytest.raises(TryAgain) as caught:
        _link(gateway.url).open("POST", "/v1/chat/completions", body={})

    assert may_have_begun == caught.value.may_have_begun


@pytest.mark.parametrize("status", [400, 404, 409, 500, 504])
def test_the_server_s_word_is_final(gateway: FakeGateway, status: int) -> None:
    """With our error body and another status than busy or unavailable."""
    gateway.refusals = deque([Refusal(status=status, code="some_code")])

    with pytest.raises(AnswerFailed) as caught:
        _link(gateway.url).open("GET", "/v1/streams/x")

    assert ("refused", "some_code", status) == (caught.value.message, caught.value.code, caught.value.status)


def test_a_refused_question_is_asked_again(gateway: FakeGateway) -> None:
    """Behind what Retry-After asks for; another answer needs no pause."""
    gateway.refusals = deque([DRAINING, DRAINING, None])
    waits: list[float] = []

    _link(gateway.url, waits=waits).ask("POST", "/v1/chat/completions", body={}, is_repeatable=False).close()

    assert ["POST /v1/chat/completions"] * 3 == gateway.lines
    assert [1.0, 1.0] == waits


def test_retry_after_is_bounded(gateway: FakeGateway) -> None:
    """A server that asks for an hour is asked again before; words are no seconds."""
    gateway.refusals = deque(
        Refusal(status=503, code="draining", headers={"retry-after": value}) for value in ("3600", "soon")
    )
    waits: list[float] = []

    _link(gateway.url, waits=waits, max_delay_s=2.0).ask("GET", "/v1/models").close()

    assert 2.0 == waits[0]
    assert 0.1 <= waits[1] <= 0.2


def test_the_last_refusal_is_the_failure(gateway: FakeGateway) -> None:
    """After so many tries; nobody was cut off."""
    gateway.refusals = deque([DRAINING] * 10)

    with pytest.raises(AnswerFailed) as caught:
        _link(gateway.url, ask=3).ask("GET", "/v1/models")

    assert ("draining", 503) == (caught.value.code, caught.value.status)
    assert 3 == len(gateway.asked)


@pytest.mark.parametrize("refusal", [CUT, PROXY])
def test_a_question_that_may_run_is_not_asked_twice(gateway: FakeGateway, refusal: Refusal) -> None:
    """Nobody would read, or stop, the first answer."""
    gateway.refusals = deque([refusal])

    with pytest.raises((AnswerCut, AnswerFailed)):
        _link(gateway.url).ask("POST", "/v1/chat/completions", body={}, is_repeatable=False)

    assert 1 == len(gateway.asked)


def test_what_may_be_repeated_is(gateway: FakeGateway) -> None:
    """A cancel told twice is a success."""
    gateway.refusals = deque([CUT, PROXY, None])

    _link(gateway.url).ask("DELETE", "/v1/requests/x").close()

    assert ["DELETE /v1/requests/x"] * 3 == gateway.lines


def test_nobody_there_is_a_cut_without_an_id(unused_tcp_port: int) -> None:
    """Each pause may be twice as long, up to its bound."""
    waits: list[float] = []

    with pytest.raises(AnswerCut) as caught:
        _link(f"http://127.0.0.1:{unused_tcp_port}", waits=waits, ask=5, max_delay_s=0.3).ask("GET", "/v1/models")

    assert caught.value.request_id is None
    assert 4 == len(waits)
    assert all(bound / 2 <= waited <= bound for bound, waited in zip((0.1, 0.2, 0.3, 0.3), waits, strict=True))


def test_the_next_gateway_takes_over(gateway: FakeGateway, unused_tcp_port: int) -> None:
    """And stays the one that is asked; a URL may end with a slash."""
    waits: list[float] = []
    link = _link(f"http://127.0.0.1:{unused_tcp_port}", gateway.url + "/", waits=waits)

    link.ask("POST", "/v1/chat/completions", body={}, is_repeatable=False).close()
    link.ask("GET", "/v1/models").close()

    assert ["POST /v1/chat/completions", "GET /v1/models"] == gateway.lines
    assert 1 == len(waits)


def test_no_url_and_no_try_are_mistakes() -> None:
    """Of whoever makes them, told at once."""
    with pytest.raises(ValueError, match="URL"):
        Link(())
    with pytest.raises(ValueError, match="one try"):
        Retries(ask=0)


@pytest.mark.parametrize("document", [None, [], {}, {"error": "text"}, {"choices": []}])
def test_only_an_error_object_is_a_failure(document: object) -> None:
    """A chunk is none."""
    assert failure_of(document) is None
