"""One client of a run under fault: asks, reads, stalls, leaves or deletes as its plan says, and tells how that ended."""

import asyncio
import codecs
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.support.chaos_load import Fate, Form, Question
from tests.support.chat import CHAT_PATH, ChatRecord
from tests.support.http_client import ConnectionCut, HttpStream, exchange, open_request
from tests.support.resuming import API_PATH, EVENTS, ReadSoFar, resume
from tests.support.script import Script

CUT_CHARACTER = "\ufffd"  # at most one, at the very end of an answer that ended inside a character
# Far above what a request may take that loses workers and waits for new ones, on a machine that does other things too.
ENDS_WITHIN_S = 150.0
RESUME_PAUSE_S = 0.3
SMALL_BUFFER = 8_192  # of a reader that stalls: what it has not read waits in the server, and not in its own kernel


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A body and its right answer. `script`: where the text of each number of tokens is known."""

    body: Mapping[str, Any]
    text: str
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    script: Script | None = None


@dataclass(slots=True, kw_only=True)
class Seen:
    """One request from its client's side. Times are seconds from the begin of the run."""

    number: int
    client_request_id: str
    asked_s: float
    gateway: int
    """The one that took it."""
    ended_s: float = 0.0
    end: End = End.WRONG
    code: str = ""
    detail: str = ""
    is_deleted: bool = False
    delete_status: int | None = None
    paused_s: float = 0.0
    """For so long it has read nothing, on purpose."""
    num_resumed: int = 0
    has_begun: bool = False
    """The server had taken it: a stream had its 200."""
    usage: Mapping[str, Any] | None = None
    record: ChatRecord = field(default_factory=lambda: ChatRecord(request_id=""))

    def __str__(self) -> str:
        what = " ".join(part for part in (self.end.value, self.code, self.detail) if part)
        times = f"asked {self.asked_s:.2f} ended {self.ended_s:.2f}"
        return f"#{self.number} {self.client_request_id} {self.record.request_id} {times}: {what}"


class Client:
    """Asks the questions of one run. `ports`, `proxy_ports`: of each gateway, and of the link to it that is cut."""

    def __init__(self, *, ports: Sequence[int], proxy_ports: Sequence[int], name: str) -> None:
        self._ports = ports
        self._proxy_ports = proxy_ports
        self._name = name
        self._clock = asyncio.get_running_loop()
        self._begun_at = self._clock.time()

    @property
    def now_s(self) -> float:
        return self._clock.time() - self._begun_at

    async def wait_until(self, at_s: float) -> None:
        """Until then; returns at once if it is over."""
        await asyncio.sleep(max(0.0, at_s - self.now_s))

    async def ask(self, question: Question, asked: Asked) -> Seen:
        """The whole life of one request. Raises nothing: what went wrong is told."""
        seen = Seen(
            number=question.number,
            client_request_id=f"{self._name}-{question.number}",
            asked_s=self.now_s,
            gateway=question.gateway,
        )
        read = self._read_on if question.is_resumable else self._read
        try:
            async with _within(ENDS_WITHIN_S):
                match question.fate:
                    case Fate.READ | Fate.STALL | Fate.LEAVE_AT_HEAD:
                        await read(question, asked, seen)
                    case Fate.LEAVE:
                        await self._read_for(question, asked, seen)
                    case Fate.DELETE:
                        async with asyncio.TaskGroup() as group:
                            deleting = group.create_task(self._delete(question, seen))
                            await read(question, asked, seen)
                            deleting.cancel()
        except* TimeoutError:
            seen.end, seen.detail = End.WRONG, f"no end in {ENDS_WITHIN_S} s"
        except* (ConnectionError, EOFError) as errors:
            seen.end, seen.detail = End.CUT, type(errors.exceptions[0]).__name__
        except* (AssertionError, ValueError, LookupError) as errors:
            seen.end, seen.detail = End.WRONG, repr(errors.exceptions[0])
        seen.ended_s = self.now_s
        judge_answer(seen, question, asked)
        return seen

    # ---- plain answers

    async def _read(self, question: Question, asked: Asked, seen: Seen) -> None:
        """To its end, or to its head."""
        async with open_request(
            await self._first_port(question, seen),
            "POST",
            CHAT_PATH,
            body=_body(question, asked),
            headers={"X-Request-Id": seen.client_request_id},
            receive_buffer=SMALL_BUFFER if question.fate is Fate.STALL else None,
            patience_s=2 * ENDS_WITHIN_S,
        ) as stream:
            try:
                seen.record.request_id = stream.headers.get("x-firsttoken-request", "")
                if stream.status != 200:
                    seen.end, seen.code = End.FAILED, json.loads(await stream.read_body())["error"]["code"]
                elif question.form is Form.WHOLE:
                    _take_whole(json.loads(await stream.read_body()), question, seen)
                elif question.fate is Fate.LEAVE_AT_HEAD:
                    seen.has_begun, seen.end = True, End.LEFT
                    stream.cut()
                else:
                    await self._read_stream(question, stream, seen)
            except BaseException:
                stream.cut()  # at once, as a client does that dies
                raise

    async def _read_stream(self, question: Question, stream: HttpStream, seen: Seen) -> None:
        seen.has_begun = True
        stalls_at_s = seen.asked_s + question.after_s if question.fate is Fate.STALL else None
        async for block in stream.blocks():
            seen.record.take(block)
            if stalls_at_s is not None and self.now_s >= stalls_at_s and not seen.record.is_done:
                begun_s, stalls_at_s = self.now_s, None
                await asyncio.sleep(question.pause_s)
                seen.paused_s = self.now_s - begun_s
        assert seen.record.is_done, "the stream ended in good order, but without [DONE]"
        seen.usage = seen.record.usage
        if seen.record.error is not None:
            seen.end, seen.code = End.FAILED, seen.record.error["code"]
            return
        assert seen.usage is not None, "no usage"
        seen.end = End.FINISHED

    async def _read_for(self, question: Question, asked: Asked, seen: Seen) -> None:
        """Reads for as long as the question says, and goes."""
        timer = asyncio.timeout(question.after_s)
        try:
            async with timer:
                await self._read(question, asked, seen)
        except TimeoutError:
            if not timer.expired():
                raise
            seen.end = End.LEFT

    async def _delete(self, question: Question, seen: Seen) -> None:
        """Beside the open answer. Without the answer's head there is no id to delete: then it is read on."""
        await asyncio.sleep(question.after_s)
        if seen.record.request_id:
            seen.is_deleted = True
            with suppress(OSError, EOFError, TimeoutError):  # its own answer may be lost with scheduler and gateway
                path = f"/v1/requests/{seen.record.request_id}"
                seen.delete_status = (await exchange(self._ports[question.delete_at], "DELETE", path)).status

    async def _first_port(self, question: Question, seen: Seen) -> int:
        """Of the other gateway where nobody listens at the first one's."""
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self._ports[question.gateway])
            writer.transport.abort()
        except ConnectionRefusedError:
            seen.gateway = 1 - question.gateway
        return (self._proxy_ports if question.by_proxy else self._ports)[seen.gateway]

    # ---- resumable answers

    async def _read_on(self, question: Question, asked: Asked, seen: Seen) -> None:
        """Over as many connections as it takes, at each gateway in turn. Raises OSError where even its id did not come."""
        read = ReadSoFar(request_id="")
        drops = iter(question.drops_s)
        is_api = question.form is Form.RESUMABLE_EVENTS
        headers = {"X-Request-Id": seen.client_request_id, **EVENTS}
        try:
            async with open_request(
                await self._first_port(question, seen),
                "POST",
                API_PATH if is_api else CHAT_PATH,
                body=_body(question, asked),
                headers=headers,
                patience_s=2 * ENDS_WITHIN_S,
            ) as stream:
                seen.record.request_id = read.request_id = stream.headers.get("x-firsttoken-request", "")
                await _take(stream, read, asked, seen, drop_after_s=next(drops, None))
        except (ConnectionError, EOFError):
            if not seen.has_begun:
                raise
        while not read.is_over and seen.end is not End.FAILED:
            seen.num_resumed += 1
            await asyncio.sleep(RESUME_PAUSE_S)
            port = self._ports[(seen.gateway + seen.num_resumed) % len(self._ports)]
            with suppress(ConnectionError, EOFError):
                async with resume(port, read) as stream:
                    await _take(stream, read, asked, seen, drop_after_s=next(drops, None))
        if read.error is not None:
            seen.end, seen.code = End.FAILED, read.error
        elif seen.end is not End.FAILED:
            seen.end, seen.record.finish_reason, seen.usage = End.FINISHED, read.finish_reason, read.usage


@asynccontextmanager
async def _within(limit_s: float) -> AsyncGenerator[None]:
    """`asyncio.timeout`, by seconds in which this process ran: one that stands still waits for nobody."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:

        def tick(left_s: int) -> None:
            nonlocal handle
            if left_s:
                handle = loop.call_later(1.0, tick, left_s - 1)
            else:
                timeout.reschedule(0.0)

        handle = loop.call_later(1.0, tick, round(limit_s))
        try:
            yield
        finally:
            handle.cancel()


def _body(question: Question, asked: Asked) -> dict[str, Any]:
    body = dict(asked.body)
    if question.form is not Form.RESUMABLE_EVENTS:
        body["stream"] = question.form is not Form.WHOLE
        if body["stream"]:
            body["stream_options"] = {"include_usage": True}
    if question.is_resumable:
        body["resumable"] = True
    if question.timeout_s is not None:
        body["timeout"] = question.timeout_s
    if question.num_choices > 1:
        body["n"] = question.num_choices
    return body


async def _take(stream: HttpStream, read: ReadSoFar, asked: Asked, seen: Seen, *, drop_after_s: float | None) -> None:
    """One connection, to its end or for so long. A refusal that names a time to come again is none; what was read counts in any case."""
    if stream.status != 200:
        code = json.loads(await stream.read_body())["error"]["code"]
        if not seen.has_begun or stream.status != 503:
            seen.end, seen.code = End.FAILED, code
        return
    seen.has_begun = True
    timer = asyncio.timeout(drop_after_s)
    try:
        async with timer:
            while True:
                before = read.last_id
                read.take(await stream.next_data())
                if read.last_id != before and asked.script is not None:
                    check_place(read, asked.script)
    except ConnectionCut:
        pass
    except TimeoutError:
        if not timer.expired():
            raise
        stream.cut()
    finally:
        seen.record.deltas[:] = [read.text]


def check_place(read: ReadSoFar, script: Script) -> None:
    """Id n = the text so far is that of the first n tokens, but for a character whose end is still to come."""
    if not read.text.endswith(CUT_CHARACTER):  # the end of an answer that was broken off inside one
        expected = text_of(script, read.last_id)
        assert expected == read.text, f"id {read.last_id} came with {len(read.text)} characters, not {len(expected)}"


def text_of(script: Script, num_tokens: int) -> str:
    """What a reader has seen of a script after so many tokens."""
    played = (list(script.pieces) * script.repeat)[:num_tokens]
    joined = b"".join(piece.encode() if isinstance(piece, str) else piece for piece in played)
    return codecs.getincrementaldecoder("utf-8")("replace").decode(joined)


def _take_whole(answer: dict[str, Any], question: Question, seen: Seen) -> None:
    choices = answer["choices"]
    assert list(range(question.num_choices)) == [choice["index"] for choice in choices]
    texts = {choice["message"]["content"] for choice in choices}
    reasons = {choice["finish_reason"] for choice in choices}
    assert 1 == len(texts) == len(reasons), "the choices differ"
    seen.record.deltas.append(texts.pop())
    seen.record.finish_reason = reasons.pop()
    seen.usage = answer["usage"]
    seen.end = End.FINISHED


def judge_answer(seen: Seen, question: Question, asked: Asked) -> None:
    """Finished means all of it, counted once; everything else is a beginning of it."""
    if seen.end is End.WRONG:
        return
    text = seen.record.text
    if seen.end is not End.FINISHED:
        if not asked.text.startswith(text.removesuffix(CUT_CHARACTER)):
            _make_wrong(seen, f"with a wrong text: {_difference(text, asked.text)}")
        return
    if text != asked.text:
        _make_wrong(seen, f"with a wrong text: {_difference(text, asked.text)}")
    elif seen.record.finish_reason != asked.finish_reason:
        _make_wrong(seen, f"by {seen.record.finish_reason}, not {asked.finish_reason}")
    elif seen.usage is not None:  # the last connection of a resumable answer may break behind its finish
        counted = (seen.usage["prompt_tokens"], seen.usage["completion_tokens"])
        expected = (asked.prompt_tokens, asked.completion_tokens * question.num_choices)
        if counted != expected:
            _make_wrong(seen, f"with {counted} tokens counted, not {expected}")


def _make_wrong(seen: Seen, why: str) -> None:
    seen.detail = f"{seen.end} {why}"
    seen.end = End.WRONG


def _difference(text: str, expected: str) -> str:
    shorter = min(len(text), len(expected))
    place = next((i for i in range(shorter) if text[i] != expected[i]), shorter)
    return (
        f"{len(text)} of {len(expected)} characters, differs from {place} on: "
        f"{text[place : place + 40]!r}, not {expected[place : place + 40]!r}"
    )
