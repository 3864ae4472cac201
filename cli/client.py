"""A small client of a firsttoken gateway: answers that go on behind a cut connection, token for token.

    from cli.client import Client

    with Client("http://127.0.0.1:8000") as client:
        with client.ask([{"role": "user", "content": "What is the capital of France?"}]) as answer:
            for text in answer:
                print(text, end="", flush=True)
        print(answer.finish_reason, answer.usage)

An answer has one of three ends: its loop ends (it has finished), or raises AnswerFailed (the server said so) or
AnswerCut (the connection was lost and could not be resumed). Speaks `/v1/chat/completions`, one answer a question.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import Self, TypedDict, cast

import httpx

from cli.client_answer import Answer
from cli.client_link import AnswerCut, AnswerError, AnswerFailed, Link, Retries, told
from cli.json_path import at, text_at

__all__ = ["Answer", "AnswerCut", "AnswerError", "AnswerFailed", "Client", "Message", "Retries"]

DEFAULT_URL = "http://127.0.0.1:8000"
ALL_RELEASED = 200


class Message(TypedDict):
    """`role` is system, user or assistant."""

    role: str
    content: str


class Client:
    """Keeps connections to one or several gateways of one system; close it, or use it as a context manager.

    With several URLs it goes on at the next gateway when one is away: an answer too. Several threads may share it.
    """

    def __init__(
        self,
        *urls: str,
        api_key: str | None = None,
        retries: Retries | None = None,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        """`wait` makes the pauses between tries (seconds)."""
        self._link = Link(urls or (DEFAULT_URL,), api_key=api_key, retries=retries, wait=wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes all connections; cancels nothing."""
        self._link.close()

    def ask(
        self,
        messages: Sequence[Message],
        *,
        model: str = "default",
        temperature: float | None = None,
        max_tokens: int | None = None,
        fields: Mapping[str, object] | None = None,
    ) -> Answer:
        """Returns once the server has taken the question. `fields` are further ones of the body: seed, stop, timeout.

        Raises AnswerFailed if it is refused, AnswerCut where no server can be reached.
        """
        body: dict[str, object] = {
            "model": model,
            "messages": list(messages),
            "temperature": temperature,
            "max_tokens": max_tokens,
            **(fields or {}),
        }
        given = {name: value for name, value in body.items() if value is not None}
        always = {"stream": True, "stream_options": {"include_usage": True}, "resumable": True}
        response = self._link.ask("POST", "/v1/chat/completions", body={**given, **always}, is_repeatable=False)
        return Answer(self._link, response, request_id=response.headers.get("x-firsttoken-request"))

    def resume(self, request_id: str, *, after: int = 0) -> Answer:
        """The text behind token `after` of an answer that was asked for with the same key, running or just ended.

        Who reads it elsewhere is told `superseded`. Nothing is sent before the first step of the loop.
        """
        return Answer(self._link, None, request_id=request_id, token_index=after)

    def cancel(self, request_id: str) -> bool:
        """True when everything is released, False when some of it is still owed. Raises AnswerError."""
        with closing(self._link.ask("DELETE", f"/v1/requests/{request_id}")) as response:
            return response.status_code == ALL_RELEASED

    def models(self) -> tuple[str, ...]:
        """Names that `ask` takes. Raises AnswerError."""
        with closing(self._link.ask("GET", "/v1/models")) as response:
            try:
                document = cast("object", json.loads(response.read()))
            except httpx.RequestError as error:
                raise AnswerCut(told(error), request_id=None) from error
            except ValueError:
                document = None
        entries = at(document, "data")
        if not isinstance(entries, list):
            raise AnswerFailed("what answers is no model server: /v1/models has no list")
        return tuple(name for entry in cast("list[object]", entries) if (name := text_at(entry, "id")))
