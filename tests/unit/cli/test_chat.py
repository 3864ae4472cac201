"""A conversation: what is sent, shown, kept and said."""

import io
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import pytest

from cli.chat import Chat, ChatOptions, Terminal, run_chat
from cli.client import Client
from cli.problem import CommandProblem
from tests.support.fake_gateway import REQUEST_ID, FakeGateway, Refusal, delta, failure, fake_gateway, finish

CANCEL = f"DELETE /v1/requests/{REQUEST_ID}"
Line = str | type[BaseException]


@pytest.fixture
def gateway() -> Generator[FakeGateway]:
    """Answers "one two"."""
    with fake_gateway([delta("one ", 1), delta("two", 2), *finish()]) as running:
        yield running


@pytest.fixture
def client(gateway: FakeGateway) -> Generator[Client]:
    """That makes no real pause."""
    with Client(gateway.url, wait=lambda _: None) as made:
        yield made


class Person:
    """Types these lines, then Ctrl-D; presses Ctrl-C when the wanted text is shown."""

    def __init__(self, *lines: Line, interrupts_at: str = "\0") -> None:
        self._lines = deque(lines)
        self._interrupts_at = interrupts_at
        self.shown = ""
        self.notes: list[str] = []

    def read_line(self) -> str:
        """What `input` would give or raise."""
        line = self._lines.popleft() if self._lines else EOFError
        if isinstance(line, str):
            return line
        raise line

    def show(self, text: str) -> None:
        """Looks at the answer."""
        self.shown += text
        if self._interrupts_at in text:
            raise KeyboardInterrupt

    def talk(self, client: Client, **options: Any) -> bool:
        """To the end of the conversation."""
        terminal = Terminal(read_line=self.read_line, show=self.show, note=self.notes.append)
        return Chat(client, ChatOptions(urls=(), **options), terminal).run()

    @property
    def num_left(self) -> int:
        return len(self._lines)


def _said(gateway: FakeGateway) -> list[list[tuple[str, str]]]:
    """The messages of each question."""
    return [
        [(message["role"], message["content"]) for message in asked.body["messages"]]
        for asked in gateway.asked
        if asked.method == "POST"
    ]


def test_each_question_has_the_conversation_before_it(gateway: FakeGateway, client: Client) -> None:
    """The system text once, at the beginning; empty lines are no questions; the answer's line is ended."""
    person = Person("a", "", " b ")

    assert person.talk(client, system="be short")

    system = ("system", "be short")
    exchange = [("user", "a"), ("assistant", "one two")]
    assert [[system, ("user", "a")], [system, *exchange, ("user", "b")]] == _said(gateway)
    assert ("one two\none two\n", []) == (person.shown, person.notes)


def test_the_options_are_passed_on(gateway: FakeGateway, client: Client) -> None:
    """What was not typed is the server's choice."""
    Person("a").talk(client)
    Person("a").talk(client, temperature=0.0, max_tokens=9)

    plain, full = (asked.body for asked in gateway.asked)
    assert not {"temperature", "max_tokens"} & plain.keys()
    assert (0.0, 9) == (full["temperature"], full["max_tokens"])


def test_ctrl_c_stops_the_answer_alone(gateway: FakeGateway, client: Client) -> None:
    """It is cancelled; what was shown of it stays in the conversation, which goes on."""
    person = Person("a", "b", interrupts_at="one")

    assert person.talk(client)

    assert [CANCEL] * 2 == [line for line in gateway.lines if line == CANCEL]
    assert [("user", "a"), ("assistant", "one "), ("user", "b")] == _said(gateway)[1]
    assert ("one \none \n", ["stopped", "stopped"]) == (person.shown, person.notes)


def test_a_second_ctrl_c_leaves(gateway: FakeGateway, client: Client) -> None:
    """At the prompt, behind one at the prompt or one that stopped an answer."""
    at_the_prompt = Person(KeyboardInterrupt, KeyboardInterrupt, "never asked")
    behind_an_answer = Person("a", KeyboardInterrupt, "never asked", interrupts_at="two")

    assert at_the_prompt.talk(client)
    assert behind_an_answer.talk(client)

    assert (1, 1) == (at_the_prompt.num_left, behind_an_answer.num_left)
    assert ["\nCtrl-C again, or Ctrl-D, leaves"] == at_the_prompt.notes
    assert 1 == len(_said(gateway))


def test_a_line_between_makes_the_next_ctrl_c_the_first(client: Client) -> None:
    """Only two in a row leave."""
    person = Person(KeyboardInterrupt, "a", KeyboardInterrupt, "b")

    assert person.talk(client)

    assert (0, "one two\none two\n") == (person.num_left, person.shown)


def test_a_cut_is_told_behind_the_answer(gateway: FakeGateway, client: Client) -> None:
    """The text is as if nothing had been; how often is said."""
    gateway.cuts = deque([len(delta("one ", 1).bytes())])

    person = Person("a")
    person.talk(client)

    assert ("one two\n", ["the connection was cut; resumed once"]) == (person.shown, person.notes)


def test_a_limit_is_told(gateway: FakeGateway, client: Client) -> None:
    """Otherwise an answer that breaks off looks like a fault."""
    gateway.answer = [delta("one\n", 1), *finish("length")]

    person = Person("a")
    person.talk(client)

    assert ("one\n", ["ended at its limit of tokens"]) == (person.shown, person.notes)


def test_a_failure_ends_the_answer_alone(gateway: FakeGateway, client: Client) -> None:
    """The exit code remembers it. A question without a word of an answer is forgotten."""
    gateway.answer = failure("worker_lost", "no worker is left")

    person = Person("a", "b")

    assert not person.talk(client)
    assert ["no worker is left"] * 2 == person.notes
    assert [[("user", "a")], [("user", "b")]] == _said(gateway)


def test_the_oldest_exchange_makes_room(gateway: FakeGateway, client: Client) -> None:
    """As many as it takes; a single question that is too long is a failure."""
    too_long = Refusal(status=400, code="context_length_exceeded")
    gateway.refusals = deque([None, None, too_long, too_long, None, too_long, too_long])
    person = Person("a", "b", "c", "d")

    assert not person.talk(client)

    questions = [[text for role, text in messages if role == "user"] for messages in _said(gateway)]
    assert [["a"], ["a", "b"], ["a", "b", "c"], ["b", "c"], ["c"], ["c", "d"], ["d"]] == questions
    assert ["the conversation is too long: its oldest exchange is left out"] * 3 == person.notes[:3]
    assert "refused" == person.notes[3]


def test_an_answer_does_not_command_the_terminal(gateway: FakeGateway, client: Client) -> None:
    """Escapes lose what makes them one, in pieces too; line ends and tabs are text."""
    gateway.answer = [delta("a\x1b", 1), delta("]0;title\x07\tb\x9b1m\r\n", 2), *finish()]

    person = Person("a")
    person.talk(client)

    assert "a]0;title\tb1m\n" == person.shown


@pytest.fixture
def type_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a text in the place of a pipe."""
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_a_pipe_gets_the_answers_alone(
    gateway: FakeGateway, type_in: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """No prompt and no greeting; notes go to stderr."""
    type_in("a\nb\n")
    gateway.answer = [delta("one", 1), *finish("length")]

    assert 0 == run_chat(ChatOptions(urls=[gateway.url]))

    out, err = capsys.readouterr()
    assert ("one\none\n", "ended at its limit of tokens\n" * 2) == (out, err)


def test_a_failed_answer_is_an_exit_code(
    gateway: FakeGateway, type_in: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    """For scripts."""
    type_in("a\n")
    gateway.answer = failure("worker_lost", "no worker is left")

    assert 1 == run_chat(ChatOptions(urls=[gateway.url]))
    assert ("", "no worker is left\n") == capsys.readouterr()


def test_nobody_there_says_what_to_do(unused_tcp_port: int) -> None:
    """Before anything is typed."""
    with pytest.raises(CommandProblem, match="firsttoken up"):
        run_chat(ChatOptions(urls=[f"127.0.0.1:{unused_tcp_port}"]))
