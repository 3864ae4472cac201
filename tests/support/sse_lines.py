"""Cuts the bytes of an event stream into events, whatever the network reads look like.

Line ends are LF, CR LF and CR, and nothing else: U+2028, U+0085 or a vertical tab are text.
"""

from dataclasses import dataclass

CR, LF = 13, 10


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
        self._line = bytearray()
        self._lines: list[str] = []
        self._last_was_cr = False

    def feed(self, data: bytes, *, at: float) -> list[Block]:
        """The blocks completed by `data`. Raises UnicodeDecodeError on a line that is not UTF-8."""
        blocks: list[Block] = []
        for byte in data:
            follows_cr, self._last_was_cr = self._last_was_cr, byte == CR
            if byte == LF and follows_cr:
                continue
            if byte not in (CR, LF):
                self._line.append(byte)
                continue
            if self._line:
                self._lines.append(self._line.decode("utf-8"))
                self._line.clear()
            elif self._lines:
                blocks.append(Block(lines=tuple(self._lines), at=at))
                self._lines = []
        return blocks

    @property
    def rest(self) -> str:
        """What was fed and is not part of a finished block."""
        return "\n".join([*self._lines, self._line.decode("utf-8", "replace")]).strip("\n")
