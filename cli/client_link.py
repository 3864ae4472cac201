"""A client's way to its gateways: one try at a time, at the next gateway after one that failed."""

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import cast

import httpx

from cli.json_path import at, text_at
from shared.aio.backoff import Backoff

# A gateway speaks at least every 15 s (a comment): three of them missing = the connection is dead and nobody said so.
READ_TIMEOUT_S = 45.0
CONNECT_TIMEOUT_S = 5.0
WRITE_TIMEOUT_S = 30.0
MAX_ERROR_BYTES = 64 * 1024
# Nothing has left this machine: asking again cannot ask twice.
NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
TOO_MANY, UNAVAILABLE, FIRST_SERVER_ERROR = 429, 503, 500


class AnswerError(Exception):
    """An answer that did not finish: AnswerFailed or AnswerCut."""


class AnswerFailed(AnswerError):
    """The server said that there is no answer, or no more of it: refused, failed, cancelled, superseded.

    `code` is the word of docs/errors.md ("" where something else answered), `status` the HTTP status, None within a
    stream.
    """

    def __init__(self, message: str, *, code: str = "", status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status


class AnswerCut(AnswerError):
    """The connection was lost and did not come back in time: nobody here knows how the answer ended.

    Text up to token `token_index` has been handed out: `Client.resume(request_id, after=token_index)` may still get the
    rest. `request_id` is None where the loss came before the server had named the request.
    """

    def __init__(self, message: str, *, request_id: str | None, token_index: int = 0) -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.token_index = token_index


class TryAgain(Exception):
    """Not now, but perhaps soon, not before `after_s` seconds. `failure`: the server's word, None where none came.

    `may_have_begun`: the server may have taken the request all the same.
    """

    def __init__(
        self, why: str, *, may_have_begun: bool, failure: AnswerFailed | None = None, after_s: float = 0.0
    ) -> None:
        super().__init__(why)
        self.why = why
        self.may_have_begun = may_have_begun
        self.failure = failure
        self.after_s = after_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """How often something is tried. Pauses double, each drawn from its upper half; a longer `Retry-After` counts."""

    ask: int = 4  # half a second: whoever asks would rather be told soon
    resume: int = 10  # about 20 s without one token more: a gateway keeps an answer for 30 s after its reader has gone
    first_delay_s: float = 0.1
    max_delay_s: float = 5.0

    def __post_init__(self) -> None:
        if self.ask < 1 or self.resume < 0:
            raise ValueError("at least one try is needed to ask, and none at least to resume")

    def backoff(self) -> Backoff:
        """For one series of tries."""
        return Backoff(initial_s=self.first_delay_s, max_s=self.max_delay_s, random=random.random)


class Link:
    """Connections to one or several gateways of the same system. Raises ValueError for no URL."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str | None = None,
        retries: Retries | None = None,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        if not urls:
            raise ValueError("at least one URL is needed")
        self.retries = retries or Retries()
        self.wait = wait
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._present = 0
        self._http = httpx.Client(
            timeout=httpx.Timeout(
                connect=CONNECT_TIMEOUT_S, read=READ_TIMEOUT_S, write=WRITE_TIMEOUT_S, pool=CONNECT_TIMEOUT_S
            ),
            headers={} if api_key is None else {"authorization": f"Bearer {api_key}"},
            trust_env=False,  # a gateway is near: no proxy that happens to be set stands between
        )

    def close(self) -> None:
        self._http.close()

    def open(
        self, method: str, path: str, *, body: object = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """One try; the response is still to be read and to be closed. Raises TryAgain or AnswerFailed."""
        request = self._http.build_request(
            method,
            self._urls[self._present] + path,
            json=body,
            headers={"accept-encoding": "identity", **(headers or {})},
        )
        try:
            response = self._http.send(request, stream=True)
            if response.is_success:
                return response
            with closing(response):
                raise _refusal(response)
        except TryAgain:
            self._turn()
            raise
        except httpx.RequestError as error:
            self._turn()
            raise TryAgain(told(error), may_have_begun=not isinstance(error, NEVER_SENT)) from error

    def ask(self, method: str, path: str, *, body: object = None, is_repeatable: bool = True) -> httpx.Response:
        """As `open`, tried `retries.ask` times. What is not repeatable is tried again only if it cannot have begun.

        Raises AnswerFailed, or AnswerCut without a request id.
        """
        backoff = self.retries.backoff()
        num_left = self.retries.ask
        while True:
            num_left -= 1
            try:
                return self.open(method, path, body=body)
            except TryAgain as again:
                if not num_left or (again.may_have_begun and not is_repeatable):
                    raise again.failure or AnswerCut(again.why, request_id=None) from again
                self.pause(backoff, again)

    def pause(self, backoff: Backoff, again: TryAgain | None) -> None:
        """Before the next try; what a server asks for is bounded too."""
        asked_s = 0.0 if again is None else min(again.after_s, self.retries.max_delay_s)
        self.wait(max(backoff.next_delay(), asked_s))

    def _turn(self) -> None:
        """To the next gateway."""
        self._present = (self._present + 1) % len(self._urls)


def told(error: httpx.RequestError) -> str:
    """For people: httpx leaves some of its errors without words."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def failure_of(document: object, *, status: int | None = None) -> AnswerFailed | None:
    """The error object of a body or of a stream's data; None where the document is none."""
    if not isinstance(at(document, "error"), dict):
        return None
    message = text_at(document, "error", "message") or "the server gives no reason"
    return AnswerFailed(message, code=text_at(document, "error", "code"), status=status)


def _refusal(response: httpx.Response) -> AnswerFailed | TryAgain:
    """What a status that is no success means. A proxy's own error, without our body, says nothing about the request."""
    status = response.status_code
    failure = failure_of(_document(response), status=status)
    if failure is None:
        failure = AnswerFailed(f"the server answers {status} {response.reason_phrase}".rstrip(), status=status)
        if status < FIRST_SERVER_ERROR:
            return failure
        return TryAgain(failure.message, may_have_begun=True, failure=failure)
    if status not in (TOO_MANY, UNAVAILABLE):
        return failure
    asked = response.headers.get("retry-after", "")
    return TryAgain(
        failure.message, may_have_begun=False, failure=failure, after_s=float(asked) if asked.isdecimal() else 0.0
    )


def _document(response: httpx.Response) -> object:
    """The body as JSON; None if it is something else, or longer than an error."""
    body = b""
    for read in response.iter_bytes():
        body += read
        if len(body) > MAX_ERROR_BYTES:
            return None
    try:
        return cast("object", json.loads(body))
    except ValueError:
        return None
