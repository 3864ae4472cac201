"""Finds stop strings in a text that arrives in parts, without showing any part of one."""

from collections.abc import Sequence


class StopMatcher:
    """The stop string that is complete first wins; of several that end at the same character, the longest.

    Each stop string is followed by a Knuth-Morris-Pratt automaton, so that a character costs the same however much is
    held. At any time as much is held as is the beginning of some stop string, never more.
    """

    __slots__ = ("_failures", "_held", "_matched", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._failures = tuple(_failures(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self._held = ""

    @property
    def num_held(self) -> int:
        """Characters that are held."""
        return len(self._held)

    def feed(self, text: str) -> tuple[str, bool]:
        """Take new text; returns what may be shown, and whether a stop string is complete (then the text is over)."""
        if not self._held and not any(stop[0] in text for stop in self._stops):
            return text, False
        for place, character in enumerate(text):
            longest = 0
            for number in range(len(self._stops)):
                if self._step(number, character):
                    longest = max(longest, len(self._stops[number]))
            if longest:
                seen = self._held + text[: place + 1]
                self._held = ""
                return seen[: len(seen) - longest], True
        seen = self._held + text
        shown = len(seen) - max(self._matched)
        self._held = seen[shown:]
        return seen[:shown], False

    def release(self) -> str:
        """The text has ended: what was held is text after all."""
        held, self._held = self._held, ""
        return held

    def _step(self, number: int, character: str) -> bool:
        """Move one automaton by one character; True when its stop string is complete."""
        stop, failures, matched = self._stops[number], self._failures[number], self._matched[number]
        while matched and stop[matched] != character:
            matched = failures[matched - 1]
        if stop[matched] == character:
            matched += 1
        self._matched[number] = matched
        return matched == len(stop)


def _failures(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper prefix that is also its suffix."""
    failures = [0] * len(stop)
    matched = 0
    for place in range(1, len(stop)):
        while matched and stop[place] != stop[matched]:
            matched = failures[matched - 1]
        if stop[place] == stop[matched]:
            matched += 1
        failures[place] = matched
    return failures
