"""Stop strings in a text that arrives in parts: as if it had arrived whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.text.stops import StopMatcher


def _feed_all(matcher: StopMatcher, parts: list[str]) -> tuple[str, bool]:
    """What is shown of a text until a stop string is complete or the text ends."""
    shown = ""
    for part in parts:
        text, is_over = matcher.feed(part)
        shown += text
        if is_over:
            return shown, True
    return shown + matcher.release(), False


def _shown_of_whole(text: str, stops: list[str]) -> tuple[str, bool]:
    """The plain definition: cut at the first end of a stop string; of several that end there, the longest is cut."""
    for end in range(1, len(text) + 1):
        longest = max((len(stop) for stop in stops if text[:end].endswith(stop)), default=0)
        if longest:
            return text[: end - longest], True
    return text, False


@pytest.mark.parametrize(
    ("stops", "parts", "shown"),
    [
        (["STOP"], ["a ST", "OP b"], "a "),
        (["STOP"], ["a ST", "AR"], "a STAR"),
        (["aab"], ["aa", "ab"], "a"),
        (["b", "ab"], ["xab"], "x"),
        (["\n\n"], ["one\n", "two\n", "\nthree"], "one\ntwo"),
        ([], ["anything"], "anything"),
    ],
)
def test_across_parts(stops: list[str], parts: list[str], shown: str) -> None:
    """No part of a stop string is shown, and what only looked like one is."""
    assert shown == _feed_all(StopMatcher(stops), parts)[0]


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4),
    parts=st.lists(st.text("abc", max_size=5), max_size=8),
)
def test_parts_make_no_difference(stops: list[str], parts: list[str]) -> None:
    """However the text is cut: what is shown is what the plain definition shows of the whole."""
    assert _shown_of_whole("".join(parts), stops) == _feed_all(StopMatcher(stops), parts)


@given(stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), text=st.text("abc", max_size=12))
def test_only_a_beginning_is_held(stops: list[str], text: str) -> None:
    """What is not shown yet is the beginning of a stop string: a reader never waits for nothing."""
    matcher = StopMatcher(stops)
    shown = ""
    for place, character in enumerate(text, start=1):
        part, is_over = matcher.feed(character)
        shown += part
        if is_over:
            return
        held = text[len(shown) : place]
        assert any(stop.startswith(held) for stop in stops)


def test_an_empty_stop_string_is_a_bug() -> None:
    """It would end every text; a request with one was refused before."""
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
