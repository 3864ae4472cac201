"""However tokens are cut, the text is that of all bytes at once, up to the stop string that is complete first."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.domain.ids import TokenId
from shared.text.detokenizer import Detokenizer

_TEXTS = st.text(alphabet=st.sampled_from("ab \u00e9人水\u200d\U0001f468\U0001f1ef"), max_size=24)
_STOPS = st.lists(st.text(alphabet="ab人", min_size=1, max_size=4), max_size=3)


def _cut(data: st.DataObject, raw: bytes) -> list[bytes]:
    borders = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    return [raw[start:end] for start, end in zip([0, *borders], [*borders, len(raw)], strict=True)]


def _run(pieces: list[bytes], stop: list[str], feed_sizes: list[int]) -> tuple[str, str, int | None]:
    """Returns the text before the flush, the flush, and the stop index."""
    detokenizer = Detokenizer(pieces.__getitem__, stop)
    shown, place = "", 0
    while place < len(pieces):
        size = feed_sizes[place % len(feed_sizes)]
        emission = detokenizer.feed([TokenId(each) for each in range(place, min(place + size, len(pieces)))])
        shown, place = shown + emission.text, place + size
        if emission.stop_index is not None:
            return shown, detokenizer.flush(), emission.stop_index
    return shown, detokenizer.flush(), None


def _expected(text: str, stop: list[str]) -> tuple[str, bool]:
    """The same rule written plainly: the first character at which some stop string is complete; of those the longest."""
    for end in range(1, len(text) + 1):
        complete = [len(each) for each in stop if text[:end].endswith(each)]
        if complete:
            return text[: end - max(complete)], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_any_cut_of_whole_text_with_stops(data: st.DataObject) -> None:
    """No U+FFFD, nothing of the stop string, and the stop index is the token that completed it."""
    draw = data.draw
    text = draw(_TEXTS)
    stop = draw(_STOPS)
    pieces = _cut(data, text.encode())
    shown, rest, index = _run(pieces, stop, draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    expected, stops = _expected(text, stop)
    assert (shown + rest, index is not None) == (expected, stops)
    if index is not None:
        before = [b"".join(pieces[:count]).decode("utf-8", "ignore") for count in (index - 1, index)]
        assert [_expected(each, stop)[1] for each in before] == [False, True]


@settings(max_examples=300, deadline=None)
@given(st.data(), st.binary(max_size=24))
def test_any_bytes_decode_as_at_once(data: st.DataObject, raw: bytes) -> None:
    """Broken bytes in the middle give what decoding them at once gives; at most one mark waits for the end."""
    shown, rest, _ = _run(_cut(data, raw), [], [1])
    assert shown + rest == raw.decode("utf-8", "replace")
    assert rest in ("", "\ufffd")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_more_is_held_than_could_become_a_stop_string(data: st.DataObject) -> None:
    """After each token, what is not shown is the beginning of some stop string."""
    draw = data.draw
    text = draw(st.text(alphabet="ab", max_size=20))
    stop = draw(st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3))
    detokenizer = Detokenizer(lambda token_id: text[token_id].encode(), stop)
    shown = ""
    for place in range(len(text)):
        emission = detokenizer.feed([TokenId(place)])
        shown += emission.text
        if emission.stop_index is not None:
            break
        held = text[len(shown) : place + 1]
        assert any(each.startswith(held) for each in stop)
