"""The text of an answer with the log probabilities of its tokens."""

from collections.abc import Sequence
from typing import Any

import pytest

from gateway.answer_text import AnswerText, TextPart
from shared.domain.ids import TokenId
from shared.domain.sampling import SamplingParams, TokenLogprobs
from shared.text.detokenizer import Detokenizer

SEEDED: dict[str, Any] = {"seed": 0}


def answer(pieces: Sequence[str | bytes], *, stop: Sequence[str] = (), **sampling: Any) -> AnswerText:
    """Token k stands for piece k; those beyond have no text and are called by their number."""
    by_id = [piece.encode() if isinstance(piece, str) else piece for piece in pieces]
    detokenizer = Detokenizer(lambda token_id: by_id[token_id] if token_id < len(by_id) else b"", stop)
    params = SamplingParams(**(SEEDED | sampling))
    return AnswerText(detokenizer, sampling=params, token_name=lambda token_id: f"<{token_id}>")


def run(text: AnswerText, ids: Sequence[int]) -> list[TextPart]:
    """All parts, the flush last; token i has the log probability -i."""
    parts = [
        text.feed(TokenId(token_id), TokenLogprobs(logprob=float(-index)))
        for index, token_id in enumerate(ids, start=1)
    ]
    return [*parts, text.flush()]


def listed(part: TextPart) -> list[tuple[object, object]]:
    """Text and log probability of each entry."""
    return [(entry["token"], entry["logprob"]) for entry in part.logprobs]


def joined_bytes(parts: Sequence[TextPart]) -> bytes:
    """Of all entries."""
    pieces: list[Any] = [entry["bytes"] for part in parts for entry in part.logprobs]
    return b"".join(map(bytes, pieces))


def test_each_token_comes_with_its_text() -> None:
    """Its own log probability, its string and its bytes."""
    parts = run(answer(["Hi", " é"]), [0, 1])

    assert ["Hi", " é", ""] == [part.text for part in parts]
    assert [[("Hi", -1.0)], [(" é", -2.0)], []] == [listed(part) for part in parts]
    assert [32, 0xC3, 0xA9] == parts[1].logprobs[0]["bytes"]


def test_the_likeliest_are_named_in_order() -> None:
    """Those without text by their name, without bytes."""
    text = answer(["a", "b"])
    top = ((TokenId(1), -0.5), (TokenId(7), -1.5), (TokenId(0), -2.5))
    part = text.feed(TokenId(0), TokenLogprobs(logprob=-2.5, top=top))

    assert [
        {"token": "b", "logprob": -0.5, "bytes": [98]},
        {"token": "<7>", "logprob": -1.5, "bytes": None},
        {"token": "a", "logprob": -2.5, "bytes": [97]},
    ] == part.logprobs[0]["top_logprobs"]


def test_txt_02_halves_of_characters_come_with_the_whole() -> None:
    """A 4-byte emoji cut 2+2: both tokens with the part that shows it; the bytes joined are those of the text."""
    emoji = "🚲".encode()
    parts = run(answer(["a", emoji[:2], emoji[2:], "b"]), [0, 1, 2, 3])

    assert ["a", "", "🚲", "b", ""] == [part.text for part in parts]
    assert [1, 0, 2, 1, 0] == [len(part.logprobs) for part in parts]
    assert "a🚲b".encode() == joined_bytes(parts)
    assert "�" in str(parts[2].logprobs[0]["token"])


def test_a_half_character_behind_text_comes_with_that_text() -> None:
    """The token begins in the part that shows its first letter."""
    water = "水".encode()
    parts = run(answer([b"x" + water[:1], water[1:] + b"y"]), [0, 1])

    assert [("x", 1), ("水y", 1), ("", 0)] == [(part.text, len(part.logprobs)) for part in parts]
    assert "x水y".encode() == joined_bytes(parts)


def test_txt_05_what_was_held_back_comes_with_its_release() -> None:
    """A stop string that was none after all, in the middle and at the end."""
    parts = run(answer(["gar", "den", "x", "den"], stop=["denial"]), [0, 1, 2, 3])

    assert ["gar", "", "denx", "", "den"] == [part.text for part in parts]
    assert [1, 0, 2, 0, 1] == [len(part.logprobs) for part in parts]
    assert [("den", -4.0)] == listed(parts[4])


def test_tokens_of_a_stop_string_are_not_listed() -> None:
    """A token that begins before it is, as some of its text is shown."""
    parts = run(answer(["one ", "a#", "##", "b"], stop=["###"]), [0, 1, 2, 3])

    assert [("one ", False), ("a", False), ("", True), ("", False), ("", False)] == [
        (part.text, part.is_stop) for part in parts
    ]
    assert [[("one ", -1.0)], [("a#", -2.0)], [], [], []] == [listed(part) for part in parts]


def test_tokens_without_text_are_not_listed() -> None:
    """Special tokens and ends; they cost no other its entry."""
    parts = run(answer(["a", "b"]), [0, 50, 1, 51])

    assert [1, 0, 1, 0, 0] == [len(part.logprobs) for part in parts]


def test_an_end_token_of_the_request_has_no_text() -> None:
    """Only where it ends the answer: before `min_tokens` it is a token like others."""
    parts = run(answer(["a", "b"], min_tokens=2, stop_token_ids=(TokenId(1),)), [0, 1, 1])

    assert ["a", "b", "", ""] == [part.text for part in parts]
    assert [1, 1, 0, 0] == [len(part.logprobs) for part in parts]


def test_a_character_that_was_cut_keeps_its_token() -> None:
    """The text has a replacement, the entry the bytes as they were."""
    parts = run(answer(["a", "é".encode()[:1]]), [0, 1])

    assert "\ufffd" == parts[-1].text
    assert [0xC3] == parts[-1].logprobs[0]["bytes"]


def test_nothing_is_listed_where_nobody_asked() -> None:
    """Text alone."""
    text = answer(["a", "b"])

    assert [TextPart("a"), TextPart("b"), TextPart("")] == [text.feed(TokenId(0)), text.feed(TokenId(1)), text.flush()]


@pytest.mark.parametrize("cut", range(1, 12))
def test_the_entries_are_the_tokens_wherever_they_are_cut(cut: int) -> None:
    """A text of long characters in pieces of `cut` bytes: every token once, in order, bytes joined equal to the text."""
    text = "Q 人水🚲🇯🇵 x".encode()
    pieces = [text[start : start + cut] for start in range(0, len(text), cut)]
    parts = run(answer(pieces), range(len(pieces)))

    assert text == joined_bytes(parts) == "".join(part.text for part in parts).encode()
    assert [float(-index) for index in range(1, len(pieces) + 1)] == [
        logprob for part in parts for _, logprob in listed(part)
    ]
    assert all(part.text for part in parts if part.logprobs)
