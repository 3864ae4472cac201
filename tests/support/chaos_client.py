"""One client of a run under fault: asks, reads, leaves or deletes as its plan says, and tells how that ended."""

import asyncio
import json
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.support.chaos_schedule import Fate, Question
from tests.support.chat import CHAT_PATH, ChatRecord
from tests.support.http_client import HttpStream, exchange, open_request
from tests.support.resuming import ReadSoFar, read_on, resume

CUT_CHARACTER = "\ufffd"  # at most one, at the very end of an answer that ended inside a character
# Far above what a request may take that loses workers and waits for new ones, on a machine that does other things too.
ENDS_WITHIN_S = 150.0
RESUME_PAUSE_S = 0.3


class End(StrEnum):
    """What a client has seen in the end."""

    FINISHED = "finished"
    FAILED = "failed"
    CUT = "cut"
    """The connection was lost; what became of the answer it cannot know."""
    LEFT = "left"
    """It has gone away itself."""
    WRONG = "wrong"
    """Something that no client may ever see."""


@dataclass(slots=True, kw_only=True)
class Seen:
    """One request from its client's side. Times are seconds from the begin of the run."""

    number: int
    client_request_id: str
    asked_s: float
    ended_s: float = 0.0
    end: End = End.WRONG
    code: str = ""
    detail: str = ""
    is_deleted: bool = False
    num_resumed: int = 0
    has_begun: bool = False
    """The server had taken it: a stream had its 200."""
    record: ChatRecord = field(default_factory=lambda: ChatRecord(request_id=""))

    def __str__(self) -> str:
        what = " ".join(part for part in (self.end.value, self.code, self.detail) if part)
        return f"#{self.number} {self.client_request_id} asked {self.asked_s:.2f} ended {self.ended_s:.2f}: {what}"


class Client:
    """Asks the questions of one run."""

    def __init__(self, *, port: int, proxy_port: int, name: str) -> None:
        self._port = port
        self._proxy_port = proxy_port
        self._name = name
        self._clock = asyncio.get_running_loop()
        self._begun_at = self._clock.time()

    @property
    def now_s(self) -> float:
        return self._clock.time() - self._begun_at

    async def wait_until(self, at_s: float) -> None:
        """Until then; returns at once if it is over."""
        await asyncio.sleep(max(0.0, at_s - self.now_s))

    async def ask(self, question: Question, body: dict[str, Any], expected: str) -> Seen:
        """The whole life of one request. Raises nothing: what went wrong is told."""
        seen = Seen(number=question.number, client_request_id=f"{self._name}-{question.number}", asked_s=self.now_s)
        try:
            match question.fate:
                case Fate.READ:
                    async with asyncio.timeout(ENDS_WITHIN_S):
                        await (self._read_on if question.is_resumable else self._read)(question, body, seen)
                case Fate.LEAVE:
                    await self._read_for(question, body, seen)
                case Fate.DELETE:
                    async with asyncio.TaskGroup() as group:
                        deleting = group.create_task(self._delete_after(question.after_s, seen))
                        await self._read(question, body, seen)
                        deleting.cancel()
        except* TimeoutError:
            seen.end, seen.detail = End.WRONG, f"no end in {ENDS_WITHIN_S} s"
        except* (ConnectionError, EOFError) as errors:
            seen.end, seen.detail = End.CUT, type(errors.exceptions[0]).__name__
        except* (AssertionError, ValueError, LookupError) as errors:
            seen.end, seen.detail = End.WRONG, repr(errors.exceptions[0])
        seen.ended_s = self.now_s
        _judge_text(seen, expected)
        return seen

    async def _read(self, question: Question, body: dict[str, Any], seen: Seen) -> None:
        port = self._proxy_port if question.by_proxy else self._port
        whole = {**body, "stream": question.is_stream}
        headers = {"X-Request-Id": seen.client_request_id}
        async with open_request(
            port, "POST", CHAT_PATH, body=whole, headers=headers, patience_s=ENDS_WITHIN_S
        ) as stream:
            try:
                await _read_answer(question, stream, seen)
            except BaseException:
                stream.cut()  # at once, as a client does that dies
                raise

    async def _read_on(self, question: Question, body: dict[str, Any], seen: Seen) -> None:
        """A resumable answer, over as many connections as it takes. Raises OSError where even its id did not come."""
        port = self._proxy_port if question.by_proxy else self._port
        headers = {"X-Request-Id": seen.client_request_id}
        whole = {**body, "stream": True, "resumable": True}
        read = ReadSoFar(request_id="")
        try:
            async with open_request(
                port, "POST", CHAT_PATH, body=whole, headers=headers, patience_s=ENDS_WITHIN_S
            ) as stream:
                seen.record.request_id = read.request_id = stream.headers.get("x-firsttoken-request", "")
                await _take(stream, read, seen)
        except (ConnectionError, EOFError):
            if not seen.has_begun:
                raise
        while not read.is_over and seen.end is not End.FAILED:
            seen.num_resumed += 1
            await asyncio.sleep(RESUME_PAUSE_S)
            with suppress(ConnectionError, EOFError):
                async with resume(port, read) as stream:
                    await _take(stream, read, seen)
        if read.error is not None:
            seen.end, seen.code = End.FAILED, read.error
        elif seen.end is not End.FAILED:
            seen.end, seen.record.finish_reason = End.FINISHED, read.finish_reason

    async def _read_for(self, question: Question, body: dict[str, Any], seen: Seen) -> None:
        """Reads for as long as the question says, and goes."""
        timer = asyncio.timeout(question.after_s)
        try:
            async with timer:
                await self._read(question, body, seen)
        except TimeoutError:
            if not timer.expired():
                raise
            seen.end = End.LEFT

    async def _delete_after(self, after_s: float, seen: Seen) -> None:
        """A DELETE beside the open answer. Without the answer's head there is no id to delete: then it is read on."""
        await asyncio.sleep(after_s)
        if seen.record.request_id:
            seen.is_deleted = True
            with suppress(OSError, EOFError, TimeoutError):  # its own answer may be lost with the scheduler
                await exchange(self._port, "DELETE", f"/v1/requests/{seen.record.request_id}")


async def _take(stream: HttpStream, read: ReadSoFar, seen: Seen) -> None:
    """One connection, to its end. A refusal that names a time to come again is none; what was read counts in any case."""
    if stream.status != 200:
        code = json.loads(await stream.read_body())["error"]["code"]
        if not seen.has_begun or stream.status != 503:
            seen.end, seen.code = End.FAILED, code
        return
    seen.has_begun = True
    try:
        await read_on(stream, read)
    finally:
        seen.record.deltas[:] = [read.text]


async def _read_answer(question: Question, stream: HttpStream, seen: Seen) -> None:
    seen.record.request_id = stream.headers.get("x-firsttoken-request", "")
    if stream.status != 200:
        seen.end, seen.code = End.FAILED, json.loads(await stream.read_body())["error"]["code"]
        return
    seen.has_begun = question.is_stream
    if question.is_stream:
        async for block in stream.blocks():
            seen.record.take(block)
        assert seen.record.is_done, "the stream ended in good order, but without [DONE]"
        if seen.record.error is not None:
            seen.end, seen.code = End.FAILED, seen.record.error["code"]
            return
    else:
        answer = json.loads(await stream.read_body())
        (choice,) = answer["choices"]
        seen.record.deltas.append(choice["message"]["content"])
        seen.record.finish_reason = choice["finish_reason"]
    seen.end = End.FINISHED


def _judge_text(seen: Seen, expected: str) -> None:
    """Finished means all of it; everything else is a beginning of it."""
    text = seen.record.text
    if seen.end is End.FINISHED:
        is_right = text == expected and seen.record.finish_reason in ("stop", "length")
    else:
        is_right = expected.startswith(text.removesuffix(CUT_CHARACTER))
    if not is_right and seen.end is not End.WRONG:
        place = next((i for i, (a, b) in enumerate(zip(text, expected, strict=False)) if a != b), len(text))
        seen.detail = (
            f"{seen.end} with a wrong text: {len(text)} of {len(expected)} characters, differs from {place} on: "
            f"{text[place : place + 40]!r}, not {expected[place : place + 40]!r}"
        )
        seen.end = End.WRONG
