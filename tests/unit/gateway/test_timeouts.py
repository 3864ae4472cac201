"""How long a request may take."""

import json
from typing import Any

import pytest

from gateway.intake import IntakeReader
from gateway.timeouts import HEADER, TimeoutRule, deadline_from_unix_ms, deadline_to_unix_ms, header_timeout_s
from shared.domain.errors import ErrorCode, ServingError
from shared.text.chat import ChatTokenizer
from tests.support.hand_clock import HandClock
from tests.support.script import counting

RULE = TimeoutRule(default_s=600.0, max_s=3600.0)


def deadline(header: str | None = None, **fields: Any) -> list[float | None]:
    """Of a request that came at 100 s, and of its children."""
    body = json.dumps({**counting(3).body(), **fields}).encode()
    intake = IntakeReader(ChatTokenizer.scripted(), "scripted").read_completion(body)
    timed = RULE.with_deadline(intake, {} if header is None else {HEADER: header}, 100.0)
    return [each.deadline for each in (timed, *timed.children)]


@pytest.mark.parametrize(
    ("header", "timeout", "expected"),
    [
        (None, None, 700.0),
        (None, 2.5, 102.5),
        ("7", None, 107.0),
        ("7", 2.5, 102.5),
        ("2", 2.5, 102.0),
        ("0.25", None, 100.25),
        (None, 1e9, 3700.0),
        ("99999", None, 3700.0),
    ],
)
def test_the_shorter_wish_within_the_maximum(header: str | None, timeout: float | None, expected: float) -> None:
    """Counted from the moment when the request came; who says nothing gets the default."""
    assert [expected] == deadline(header, timeout=timeout)


def test_answers_to_one_question_share_its_deadline() -> None:
    """And so does the question."""
    assert [102.5] * 3 == deadline(timeout=2.5, n=2)


@pytest.mark.parametrize("text", ["0", "-1", "soon", "", "nan", "inf", "1 s"])
def test_a_header_that_is_no_time_is_refused(text: str) -> None:
    """By name."""
    with pytest.raises(ServingError) as caught:
        header_timeout_s({HEADER: text})
    assert (ErrorCode.INVALID_REQUEST, "X-Request-Timeout") == (caught.value.code, caught.value.param)


@pytest.mark.parametrize("timeout", [0, -1, "5", True])
def test_a_body_whose_timeout_is_no_time_is_refused(timeout: object) -> None:
    """By name, too."""
    with pytest.raises(ServingError) as caught:
        deadline(timeout=timeout)
    assert (ErrorCode.INVALID_REQUEST, "timeout") == (caught.value.code, caught.value.param)


def test_a_deadline_is_the_same_moment_at_another_gateway() -> None:
    """Monotonic clocks have nothing in common: it goes by the wall clock, and what has passed meanwhile is gone."""
    here, there = HandClock(monotonic=100.0, unix_ms=5_000_000), HandClock(monotonic=7.0, unix_ms=5_004_000)
    kept = deadline_to_unix_ms(112.5, here)
    assert (5_012_500, 15.5) == (kept, deadline_from_unix_ms(kept, there))


def test_no_deadline_stays_none() -> None:
    """As 0."""
    clock = HandClock()
    assert (0, None) == (deadline_to_unix_ms(None, clock), deadline_from_unix_ms(0, clock))
