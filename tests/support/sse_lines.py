"""Cuts the bytes of an event stream into events, whatever the network reads look like.

Line ends are LF, CR LF and CR, and nothing else: U+2028, U+0085 or a vertical tab are text.
"""

import re
from dataclasses import dataclass

LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """What lay between two empty lines, and when its last byte was read (seconds of the event loop's clock)."""

    lines: tuple[str, ...]
    at: float

    @property
    def data(self) -> str | None:
        """The joined data lines; None if there are none (a block of comments)."""
        parts = [value for name, value in self.fields if name == "data"]
        return "\n".join(parts) if parts else None

    @property
    def event(self) -> str | None:
        """The last event name; None if there is none."""
        names = [value for name, value in self.fields if name == "event"]
        return names[-1] if names else None

    @property
    def fields(self) -> tuple[tuple[str, str], ...]:
        """(name, value) of each line; a comment has the empty name."""
        return tuple(_field(line) for line in self.lines)

    @property
    def is_comment(self) -> bool:
        return all(name == "" for name, _ in self.fields)


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name, value.removeprefix(" ")


class BlockSplitter:
    """Feed it reads of any size; it gives each block once its empty line was seen."""

    def __init__(self) -> None:
        self._rest = b""
        self._ends_with_cr = False
        self._lines: list[str] = []

    def feed(self, data: bytes, *, at: float) -> list[Block]:
        """The blocks completed by `data`. Raises UnicodeDecodeError on a line that is not UTF-8."""
        if self._ends_with_cr and data:  # that was a line end already; its LF is none
            data = data.removeprefix(b"\n")
            self._ends_with_cr = False
        self._ends_with_cr = self._ends_with_cr or data.endswith(b"\r")
        *ended, self._rest = LINE_END.split(self._rest + data)
        blocks: list[Block] = []
        for line in ended:
            if line:
                self._lines.append(line.decode("utf-8"))
            elif self._lines:
                blocks.append(Block(lines=tuple(self._lines), at=at))
                self._lines = []
        return blocks

    @property
    def rest(self) -> str:
        """What was fed and is not part of a finished block."""
        return "\n".join([*self._lines, self._rest.decode("utf-8", "replace")]).strip("\n")
