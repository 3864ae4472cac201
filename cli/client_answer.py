"""One answer as it comes: its text piece by piece, across cut connections, to one of three ends."""

import json
from collections.abc import Iterator
from types import TracebackType
from typing import Self, cast

import httpx

from cli.client_link import AnswerCut, AnswerError, AnswerFailed, Link, TryAgain, failure_of, told
from cli.event_stream import EventSplitter, StreamEvent
from cli.json_path import at, count_at, text_at
from shared.domain.request import Usage

NOT_FOUND = 404
DONE = "[DONE]"
LAST_EVENT_ID = "last-event-id"


class Answer(Iterator[str]):
    """Iterate for the text. The loop ends when the answer has finished; else it raises AnswerFailed or AnswerCut.

    As a context manager it cancels what has not ended when the block is left; `close` first lets it run on. Belongs to
    one thread; another one cancels by `Client.cancel(answer.request_id)`, and the loop then raises AnswerFailed.
    """

    def __init__(
        self, link: Link, response: httpx.Response | None, *, request_id: str | None, token_index: int = 0
    ) -> None:
        """Made by a Client. Without a response the first step is to resume behind `token_index`."""
        self._link = link
        self._response = response
        self._texts = self._read()
        self._is_over = False
        self._num_left = link.retries.resume
        self._backoff = link.retries.backoff()
        self._num_beyond = 0  # characters handed out that `token_index` does not count yet
        self._num_known = 0  # of those, how many the present connection has still to repeat
        self.request_id = request_id
        """As the server calls it; None where it is no firsttoken gateway: then nothing can be resumed."""
        self.token_index = token_index
        """The text so far is that of so many tokens."""
        self.text = ""
        """Everything handed out by this object."""
        self.num_resumed = 0
        """How often the answer went on behind a cut connection."""
        self.finish_reason: str | None = None
        """"stop" or "length" once it has finished."""
        self.usage: Usage | None = None
        """Of a finished answer; None where the connection was lost behind its last word."""

    def __next__(self) -> str:
        return next(self._texts)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_over:
            return
        try:
            self.cancel()
        except AnswerError:
            pass  # it cannot be told now; a gateway ends what has no reader by itself

    def close(self) -> None:
        """Only lets go: a firsttoken gateway waits 30 s for somebody to resume, and then cancels."""
        self._is_over = True
        if self._response is not None:
            self._response.close()

    def cancel(self) -> None:
        """Ends the answer and frees what it holds. Raises AnswerError where the server could not be told."""
        self.close()
        if self.request_id is not None:
            self._link.ask("DELETE", f"/v1/requests/{self.request_id}").close()

    def _read(self) -> Iterator[str]:
        """To the end, over as many connections as it takes."""
        try:
            while not self._is_over:
                why = "nothing was read yet"
                if self._response is not None:
                    try:
                        yield from self._read_response(self._response)
                        why = "the stream stopped before its end"
                    except httpx.RequestError as error:
                        why = told(error)
                    self._response.close()
                    self._is_over = self._is_over or self.finish_reason is not None
                    if self._is_over:
                        return
                self._response = self._resume(why)
        finally:
            # Also behind an interrupt, which says nothing about the answer: leaving the block then cancels it.
            if self._response is not None:
                self._response.close()

    def _read_response(self, response: httpx.Response) -> Iterator[str]:
        """One connection, to its end or to the answer's."""
        splitter = EventSplitter()
        for read in response.iter_bytes():
            try:
                events = splitter.feed(read)
            except ValueError as problem:
                raise self._failed(AnswerFailed(f"the stream cannot be read: {problem}")) from None
            for event in events:
                if text := self._take(event):
                    self.text += text
                    yield text
                if self._is_over:
                    return

    def _take(self, event: StreamEvent) -> str:
        """The text that an event brings beyond what was handed out. Raises AnswerFailed."""
        if event.data == DONE:
            self._is_over = self.finish_reason is not None
            return ""
        try:
            chunk = cast("object", json.loads(event.data))
        except ValueError:
            raise self._failed(AnswerFailed("the stream cannot be read: an event is not JSON")) from None
        failure = failure_of(chunk)
        if failure is not None:
            raise self._failed(failure)
        self.finish_reason = text_at(chunk, "choices", 0, "finish_reason") or self.finish_reason
        self.usage = usage_of(chunk) or self.usage
        text = text_at(chunk, "choices", 0, "delta", "content")
        if self._num_known:
            known = min(self._num_known, len(text))
            self._num_known -= known
            text = text[known:]
        self._count(event.event_id, len(text))
        return text

    def _count(self, event_id: str | None, num_chars: int) -> None:
        """Where the answer is now. Text under no id, or under one that was there before, comes again after a cut."""
        token_index = int(event_id) if event_id is not None and event_id.isdecimal() else 0
        if token_index <= self.token_index:
            self._num_beyond += num_chars
            return
        self.token_index, self._num_beyond = token_index, 0
        self._num_left = self._link.retries.resume
        self._backoff.reset()

    def _resume(self, why: str) -> httpx.Response:
        """A connection that goes on behind `token_index`. Raises AnswerCut, or AnswerFailed if the server says so."""
        again: TryAgain | None = None
        lost = why
        while self.request_id is not None and self._num_left:
            self._num_left -= 1
            self._link.pause(self._backoff, again)
            try:
                response = self._link.open(
                    "GET", f"/v1/streams/{self.request_id}", headers={LAST_EVENT_ID: str(self.token_index)}
                )
            except TryAgain as refused:
                again, why = refused, refused.why
            except AnswerFailed as failed:
                if failed.status != NOT_FOUND:
                    raise self._failed(failed) from None
                why = failed.message
                break
            else:
                self.num_resumed += 1
                self._num_known = self._num_beyond
                return response
        self._is_over = True
        raise AnswerCut(
            f"the connection was lost ({lost}) and the answer could not be resumed ({why})",
            request_id=self.request_id,
            token_index=self.token_index,
        )

    def _failed(self, failure: AnswerFailed) -> AnswerFailed:
        self._is_over = True
        return failure


def usage_of(chunk: object) -> Usage | None:
    """Of a chunk that has it."""
    if not isinstance(at(chunk, "usage"), dict):
        return None
    return Usage(
        prompt_tokens=count_at(chunk, "usage", "prompt_tokens"),
        completion_tokens=count_at(chunk, "usage", "completion_tokens"),
        cached_tokens=count_at(chunk, "usage", "prompt_tokens_details", "cached_tokens"),
    )
