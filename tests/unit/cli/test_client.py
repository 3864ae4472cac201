"""What a client sends and what it understands."""

import re
from collections import deque
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from cli.client import AnswerCut, AnswerFailed, Client
from tests.support.fake_gateway import REQUEST_ID, FakeGateway, Refusal, delta, fake_gateway, finish

README = Path(__file__).resolve().parents[3] / "README.md"


@pytest.fixture
def gateway() -> Generator[FakeGateway]:
    """With one short answer."""
    with fake_gateway([delta("x", 1), *finish()]) as running:
        yield running


@pytest.fixture
def client(gateway: FakeGateway) -> Generator[Client]:
    """With a key; makes no real pause."""
    with Client(gateway.url, api_key="secret", wait=lambda _: None) as made:
        yield made


def test_a_question_has_what_was_given_and_nothing_else(gateway: FakeGateway, client: Client) -> None:
    """Always a resumable stream with its usage, also where the fields say otherwise."""
    messages: Any = [{"role": "user", "content": "hä"}]
    always = {"stream": True, "stream_options": {"include_usage": True}, "resumable": True}

    client.ask(messages).close()
    client.ask(
        messages, model="tiny", temperature=0.0, max_tokens=5, fields={"seed": 1, "stream": False, "stop": None}
    ).close()

    plain, full = (asked.body for asked in gateway.asked)
    assert {"model": "default", "messages": messages, **always} == plain
    assert {
        "model": "tiny",
        "messages": messages,
        "temperature": 0.0,
        "max_tokens": 5,
        "seed": 1,
        **always,
    } == full


def test_every_call_has_the_key(gateway: FakeGateway, client: Client) -> None:
    """An answer is given to its own key alone."""
    gateway.cuts = deque([5])

    list(client.ask([]))
    client.cancel(REQUEST_ID)
    client.models()

    assert ["POST", "GET", "DELETE", "GET"] == [asked.method for asked in gateway.asked]
    assert {"Bearer secret"} == {asked.headers["authorization"] for asked in gateway.asked}


def test_a_refused_question_is_a_failure(gateway: FakeGateway, client: Client) -> None:
    """At once: no answer is made."""
    gateway.refusals = deque([Refusal(status=400, code="context_length_exceeded")])

    with pytest.raises(AnswerFailed) as caught:
        client.ask([])

    assert ("context_length_exceeded", 400) == (caught.value.code, caught.value.status)


def test_a_cancel_says_whether_all_is_released(gateway: FakeGateway, client: Client) -> None:
    """202 = some of it is still owed."""
    gateway.refusals = deque([None, Refusal(status=202)])

    assert [True, False] == [client.cancel("x"), client.cancel("x")]
    assert ["DELETE /v1/requests/x"] * 2 == gateway.lines


def test_models_are_named(gateway: FakeGateway, client: Client) -> None:
    """In the server's order."""
    assert ("tiny", "default") == client.models()


def test_another_server_is_told_apart(gateway: FakeGateway, client: Client) -> None:
    """Something answers, but no list of models."""
    gateway.refusals = deque([Refusal(status=200)])

    with pytest.raises(AnswerFailed, match="no model server"):
        client.models()


def test_nobody_there(unused_tcp_port: int) -> None:
    """A cut without an id, whatever was asked."""
    with Client(f"http://127.0.0.1:{unused_tcp_port}", wait=lambda _: None) as client:
        for call in (client.models, lambda: client.ask([]), lambda: client.cancel("x")):
            with pytest.raises(AnswerCut) as caught:
                call()
            assert caught.value.request_id is None


def test_the_readme_s_example(gateway: FakeGateway, capsys: pytest.CaptureFixture[str]) -> None:
    """As written, but for the port: text, reason and usage."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (code,) = (block for block in blocks if "cli.client" in block)

    exec(compile(code.replace("http://127.0.0.1:8000", gateway.url), "README.md", "exec"), {})

    assert capsys.readouterr().out.startswith("x\nstop, Usage(prompt_tokens=7")
