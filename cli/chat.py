"""`firsttoken chat`: a conversation in the terminal. Answers go to stdout, everything else to stderr.

Ctrl-C stops an answer, and what was shown of it stays in the conversation; a second one in a row, or Ctrl-D, leaves.
"""

import importlib
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console

from cli.client import Answer, AnswerError, AnswerFailed, Client, Message
from cli.problem import EXIT_FAILED, CommandProblem
from cli.status import checked_url

PROMPT = "> "
TOO_LONG = ("context_length_exceeded", "exceeds_kv_capacity")
# A model may write what a terminal obeys (colours, titles, keys typed by themselves): only line ends and tabs pass.
CONTROLS = dict.fromkeys([*range(0x20), *range(0x7F, 0xA0)])
del CONTROLS[ord("\n")], CONTROLS[ord("\t")]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """What was typed. None = the server's own."""

    urls: Sequence[str]
    system: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminal:
    """Where a person sits. `read_line` raises EOFError at the end and KeyboardInterrupt for Ctrl-C."""

    read_line: Callable[[], str]
    show: Callable[[str], None]
    note: Callable[[str], None]


class Chat:
    """One conversation: `run` to its end."""

    def __init__(self, client: Client, options: ChatOptions, terminal: Terminal) -> None:
        self._client = client
        self._options = options
        self._terminal = terminal
        self._exchanges: list[tuple[Message, Message]] = []
        self._num_interrupts = 0  # in a row: a line that was typed ends the row
        self._has_failed = False

    def run(self) -> bool:
        """Asks and shows until the person leaves. True if every answer was finished or stopped by hand."""
        while self._num_interrupts < 2:
            try:
                question = self._terminal.read_line().strip()
            except EOFError:
                break
            except KeyboardInterrupt:
                self._num_interrupts += 1
                if self._num_interrupts < 2:
                    self._terminal.note("\nCtrl-C again, or Ctrl-D, leaves")
                continue
            self._num_interrupts = 0
            if question:
                self._ask(question)
        return not self._has_failed

    def _ask(self, question: str) -> None:
        """One exchange, kept if there was a word of an answer."""
        asked = Message(role="user", content=question)
        shown: list[str] = []
        try:
            with self._open(asked) as answer:
                for text in answer:
                    shown.append(text.translate(CONTROLS))
                    self._terminal.show(shown[-1])
            self._end_line(shown)
            self._tell(answer)
        except KeyboardInterrupt:
            self._num_interrupts = 1
            self._end_line(shown)
            self._terminal.note("stopped")
        except AnswerError as error:
            self._has_failed = True
            self._end_line(shown)
            self._terminal.note(str(error))
        if any(shown):
            self._exchanges.append((asked, Message(role="assistant", content="".join(shown))))

    def _open(self, asked: Message) -> Answer:
        """Leaves out the oldest exchanges where the conversation has become too long. Raises AnswerError."""
        while True:
            try:
                return self._client.ask(
                    self._messages(asked),
                    temperature=self._options.temperature,
                    max_tokens=self._options.max_tokens,
                )
            except AnswerFailed as failure:
                if failure.code not in TOO_LONG or not self._exchanges:
                    raise
                del self._exchanges[0]
                self._terminal.note("the conversation is too long: its oldest exchange is left out")

    def _messages(self, asked: Message) -> list[Message]:
        system = [] if self._options.system is None else [Message(role="system", content=self._options.system)]
        return [*system, *(message for exchange in self._exchanges for message in exchange), asked]

    def _end_line(self, shown: Sequence[str]) -> None:
        if any(shown) and not "".join(shown).endswith("\n"):
            self._terminal.show("\n")

    def _tell(self, answer: Answer) -> None:
        """What cannot be seen in the text."""
        if answer.num_resumed:
            times = "once" if answer.num_resumed == 1 else f"{answer.num_resumed} times"
            self._terminal.note(f"the connection was cut; resumed {times}")
        if answer.finish_reason == "length":
            self._terminal.note("ended at its limit of tokens")


def run_chat(options: ChatOptions) -> int:
    """The exit code. Raises CommandProblem where no gateway answers."""
    urls = [checked_url(url) for url in options.urls]
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    errors = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a paste in another encoding ends nothing
    with Client(*urls) as client:
        try:
            names = client.models()
        except AnswerError as error:
            raise CommandProblem(
                f"no gateway answers at {' or '.join(urls)} ({error}); start the system with `firsttoken up`, or name "
                "another gateway with --url"
            ) from None
        terminal = Terminal(
            read_line=lambda: input(PROMPT if is_interactive else ""),
            show=lambda text: print(text, end="", flush=True),
            note=lambda text: errors.print(text, style="dim"),
        )
        if is_interactive:
            importlib.import_module("readline")  # its import is what gives `input` arrow keys and a history
            terminal.note(f"{names[0] if names else 'a model'} at {urls[0]}: Ctrl-C stops an answer, Ctrl-D leaves")
        return 0 if Chat(client, options, terminal).run() else EXIT_FAILED
