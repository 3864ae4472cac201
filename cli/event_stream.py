"""Cuts the bytes of an event stream into events, whatever the network reads look like. Pure.

Line ends are LF, CR LF and CR and nothing else: U+2028 is text. What has no empty line behind it was cut: no event.
"""

import re
from dataclasses import dataclass

LINE_END = re.compile(rb"\r\n|\n|\r")
# An event holds the text of one batch of tokens, with log probabilities some 10 KB: far longer is no answer of ours.
MAX_EVENT_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """What lay between two empty lines and had data. `event_id` None = it had no `id:` line of its own."""

    data: str
    event_id: str | None = None


class EventSplitter:
    """One stream's reader: feed it reads of any size."""

    def __init__(self) -> None:
        self._rest = b""
        self._ends_with_cr = False
        self._data: list[str] = []
        self._event_id: str | None = None
        self._num_bytes = 0

    def feed(self, read: bytes) -> list[StreamEvent]:
        """The events that `read` completes; comments and other fields are passed over.

        Raises ValueError for an event above MAX_EVENT_BYTES.
        """
        if self._ends_with_cr and read:  # that was a line end already: its LF is none
            read = read.removeprefix(b"\n")
            self._ends_with_cr = False
        self._ends_with_cr = self._ends_with_cr or read.endswith(b"\r")
        *lines, self._rest = LINE_END.split(self._rest + read)
        events = [event for line in lines if (event := self._take(line)) is not None]
        if self._num_bytes + len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        return events

    def _take(self, line: bytes) -> StreamEvent | None:
        """One line; the event that it ends."""
        if not line:
            event = StreamEvent(data="\n".join(self._data), event_id=self._event_id) if self._data else None
            self._data, self._event_id, self._num_bytes = [], None, 0
            return event
        name, _, value = line.decode("utf-8", errors="replace").partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
            self._num_bytes += len(line)
        elif name == "id":
            self._event_id = value
        return None
