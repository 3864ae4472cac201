"""The detokenizer, row by row of the cases TXT-01 to TXT-06, on byte pieces."""

from collections.abc import Sequence

import pytest

from shared.domain.ids import TokenId
from shared.text.detokenizer import Detokenizer, Emission


def _play(pieces: Sequence[bytes], stop: Sequence[str] = ()) -> tuple[list[str], int | None]:
    """Feed the pieces one by one; returns the deltas (flush included, empty ones left out) and the stop index."""
    detokenizer = Detokenizer(pieces.__getitem__, stop)
    deltas: list[str] = []
    for token_id in range(len(pieces)):
        emission = detokenizer.feed([TokenId(token_id)])
        deltas.append(emission.text)
        if emission.stop_index is not None:
            return [each for each in deltas if each], emission.stop_index
    deltas.append(detokenizer.flush())
    return [each for each in deltas if each], None


def test_a_character_cut_into_tokens_comes_once() -> None:
    """TXT-01: three bytes in three tokens are one character, sent when whole."""
    pieces = [b"Q ", b"\xe4\xba\xba", b"\xe6", b"\xb0", b"\xb4", b"x"]
    assert _play(pieces) == (["Q ", "人", "水", "x"], None)


def test_cut_emoji_are_never_broken() -> None:
    """TXT-02: an emoji cut 2+2, a family joined by U+200D, and a flag pair."""
    text = "\U0001f600 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1ef\U0001f1f5"
    raw = text.encode()
    deltas, _ = _play([raw[place : place + 2] for place in range(0, len(raw), 2)])
    assert "".join(deltas) == text
    assert all("\ufffd" not in delta for delta in deltas)


def test_a_stop_string_over_tokens_is_never_sent() -> None:
    """TXT-04: the match ends the answer at its token; a near miss is released."""
    pieces = [b"one ", b"tw", b"o th", b"ree", b" four"]
    assert _play(pieces, ["two three"]) == (["one "], 4)
    deltas, index = _play([*pieces[:3], b"rill"], ["two three"])
    assert ("".join(deltas), index) == ("one two thrill", None)


def test_held_text_is_released_at_the_end() -> None:
    """TXT-05: the beginning of a stop string at the end of the answer is text."""
    assert _play([b"gar", b"den"], ["denial"]) == (["gar", "den"], None)


def test_the_stop_index_counts_tokens_within_one_batch() -> None:
    """TXT-06: several tokens in one feed; what follows the match is ignored, now and later."""
    pieces = [b"a", b"#", b"##", b"more"]
    detokenizer = Detokenizer(pieces.__getitem__, ["###"])
    assert detokenizer.feed([TokenId(each) for each in (0, 1, 2, 3, 3)]) == Emission("a", 3)
    assert detokenizer.num_fed == 3
    assert detokenizer.feed([TokenId(3)]) == Emission("")
    assert detokenizer.flush() == ""


def test_an_answer_cut_inside_a_character_ends_in_one_mark() -> None:
    """Three of an emoji's four bytes become one U+FFFD, and only at the flush."""
    assert _play([b"ok", b"\xf0\x9f", b"\x98"]) == (["ok", "\ufffd"], None)


def test_held_text_and_a_cut_character_come_in_order() -> None:
    """What was held for a stop string stands before the mark of the cut character."""
    assert _play([b"den", b"\xe4"], ["denial"]) == (["den\ufffd"], None)


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["b", "abcd"], ("a", 2)),  # complete first wins, though another began earlier
        (["bc", "abc"], ("", 3)),  # of those complete at the same character the longest
        (["aba", "bcx"], ("abcd", None)),
        (["d", "d"], ("abc", 4)),
    ],
)
def test_several_stop_strings(stop: list[str], expected: tuple[str, int | None]) -> None:
    """Which stop string wins does not depend on how the text is cut."""
    deltas, index = _play([b"a", b"b", b"c", b"d"], stop)
    assert ("".join(deltas), index) == expected
    whole = Detokenizer(lambda _: b"abcd", stop)
    emission = whole.feed([TokenId(0)])
    assert emission.text + whole.flush() == expected[0]


def test_a_leading_blank_is_dropped_once_and_only_at_the_start() -> None:
    """Tokens without text before it do not count; later blanks stay."""
    pieces = [b"", b" red", b" green", b" "]
    detokenizer = Detokenizer(pieces.__getitem__, strips_leading_blank=True)
    texts = [detokenizer.feed([TokenId(each)]).text for each in range(4)]
    assert texts == ["", "red", " green", " "]


def test_what_is_held_is_counted() -> None:
    """Whole characters that may become a stop string; halves of one are no characters yet."""
    pieces = [b"ab\xc3", b"\xa9x", b"y", b"z"]
    detokenizer = Detokenizer(lambda token_id: pieces[token_id], ["\u00e9xy!"])
    held: list[int] = []
    for token_id in range(4):
        detokenizer.feed([TokenId(token_id)])
        held.append(detokenizer.num_held_chars)

    assert [0, 2, 3, 0] == held
    assert b"y" == detokenizer.token_bytes(TokenId(2))


def test_an_empty_stop_string_is_a_mistake() -> None:
    """It would match before the first character."""
    with pytest.raises(ValueError, match="must not be empty"):
        Detokenizer(lambda _: b"", [""])
