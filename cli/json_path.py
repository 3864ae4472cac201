"""Looks into a JSON document of somebody else's without trusting its shape. Pure."""

from typing import cast


def at(document: object, *path: str | int) -> object:
    """What lies under these keys and places; None where something is missing or of another kind."""
    found = document
    for step in path:
        match found, step:
            case dict(), str():
                found = cast("dict[object, object]", found).get(step)
            case list(), int():
                entries = cast("list[object]", found)
                found = entries[step] if 0 <= step < len(entries) else None
            case _:
                return None
    return found


def text_at(document: object, *path: str | int) -> str:
    """As `at`; "" for what is no text."""
    found = at(document, *path)
    return found if isinstance(found, str) else ""


def count_at(document: object, *path: str | int) -> int:
    """As `at`; 0 for what is no whole number."""
    found = at(document, *path)
    return found if isinstance(found, int) and not isinstance(found, bool) else 0
