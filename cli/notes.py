"""What `firsttoken up` says while it works: notes on stderr, the two lines that others read on stdout."""

from rich.console import Console
from rich.status import Status


class Notes:
    """On a terminal the present wait is one moving line; elsewhere each new wait is a line of its own."""

    def __init__(self) -> None:
        self._err = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
        self._waiting: Status | None = None
        self.waiting_for = ""

    def say(self, text: str) -> None:
        """One line that stays."""
        self._err.print(text)

    def wait_for(self, what: str) -> None:
        """What is waited for now; the same again is not repeated."""
        if what == self.waiting_for:
            return
        self.waiting_for = what
        if not self._err.is_terminal:
            self._err.print(f"waiting: {what}")
        elif self._waiting is None:
            self._waiting = self._err.status(f"waiting: {what}")
            self._waiting.start()
        else:
            self._waiting.update(f"waiting: {what}")

    def waited(self) -> None:
        """Nothing is waited for any more."""
        self.waiting_for = ""
        if self._waiting is not None:
            self._waiting.stop()
            self._waiting = None

    def tell(self, *lines: str) -> None:
        """On stdout, at once, even into a pipe; in one piece, as a reader may leave after the first line."""
        print("\n".join(lines), flush=True)
