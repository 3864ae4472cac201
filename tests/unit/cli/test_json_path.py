"""Looking into a document that may have any shape."""

import pytest

from cli.json_path import at, count_at, text_at

DOCUMENT = {"choices": [{"delta": {"content": "x"}, "index": 3, "is_last": True}]}


@pytest.mark.parametrize(
    ("path", "found"),
    [
        (("choices", 0, "delta", "content"), "x"),
        (("choices", 0, "index"), 3),
        (("choices", 1), None),
        (("choices", -1), None),
        (("choices", "delta"), None),
        ((0,), None),
        (("choices", 0, "delta", "content", "more"), None),
    ],
)
def test_what_is_there_is_found_and_the_rest_is_none(path: tuple[str | int, ...], found: object) -> None:
    """No step raises, whatever it meets."""
    assert found == at(DOCUMENT, *path)


def test_kinds_are_looked_at() -> None:
    """A number is no text, a text no number, and true is not 1."""
    assert ("x", "") == (text_at(DOCUMENT, "choices", 0, "delta", "content"), text_at(DOCUMENT, "choices", 0, "index"))
    assert (3, 0) == (count_at(DOCUMENT, "choices", 0, "index"), count_at(DOCUMENT, "choices", 0, "is_last"))
    assert 0 == count_at(DOCUMENT, "choices", 0, "delta", "content")
