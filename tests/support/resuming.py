"""Reads resumable answers in both dialects, cut wherever a test wants."""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from tests.support.chat import CHAT_PATH
from tests.support.http_client import ConnectionCut, HttpStream, open_request
from tests.support.script import Script
from tests.support.sse_lines import Block

API_PATH = "/api/chat"
STREAMS_PATH = "/v1/streams/"
EVENTS = {"Accept": "text/event-stream"}


@dataclass(slots=True, kw_only=True)
class ReadSoFar:
    """What a client has of one answer, over all its connections."""

    request_id: str
    text: str = ""
    last_id: int = 0
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    error: str | None = None
    num_events: int = 0

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def take(self, block: Block) -> None:
        """Adds one event. Raises AssertionError where an id does not grow, or comes with an event that is no text."""
        self.num_events += 1
        data = block.data
        if data is None or data == "[DONE]":
            return
        body = json.loads(data)
        text = self._take_body(block.event, body)
        ids = [value for name, value in block.fields if name == "id"]
        assert bool(text) == bool(ids), "an id comes with a text, and with nothing else"
        if text:
            (number,) = ids
            assert int(number) > self.last_id, "ids grow"
            self.text, self.last_id = self.text + text, int(number)

    def _take_body(self, event: str | None, body: dict[str, Any]) -> str:
        if "error" in body:
            self.error = body["error"]["code"]
        elif event == "delta":
            return body["delta"]
        elif event == "done":
            self.finish_reason, self.usage = body["finish_reason"], body["usage"]
        elif body["choices"]:
            (choice,) = body["choices"]
            self.finish_reason = choice["finish_reason"]
            return choice["delta"].get("content") or ""
        else:
            self.usage = body["usage"]
        return ""


@asynccontextmanager
async def ask_resumable(
    port: int,
    script: Script,
    *,
    path: str = CHAT_PATH,
    headers: Mapping[str, str] | None = None,
    receive_buffer: int | None = None,
    **parameters: Any,
) -> AsyncGenerator[tuple[HttpStream, ReadSoFar]]:
    """The first connection of an answer. `receive_buffer` as for `open_request`."""
    body = {**script.body(), "resumable": True, **parameters}
    if path == CHAT_PATH:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    sent = {**EVENTS, **(headers or {})}
    async with open_request(port, "POST", path, body=body, headers=sent, receive_buffer=receive_buffer) as stream:
        assert 200 == stream.status, await stream.read_body()
        yield stream, ReadSoFar(request_id=stream.headers["x-firsttoken-request"])


@asynccontextmanager
async def resume(port: int, read: ReadSoFar, *, headers: Mapping[str, str] | None = None) -> AsyncGenerator[HttpStream]:
    """A further connection, behind what was read. Its status is the test's to look at."""
    sent = {**EVENTS, **(headers or {})}
    if read.last_id:
        sent["Last-Event-ID"] = str(read.last_id)
    async with open_request(port, "GET", STREAMS_PATH + read.request_id, headers=sent) as stream:
        yield stream


async def read_on(stream: HttpStream, read: ReadSoFar, *, max_events: int | None = None) -> ReadSoFar:
    """So many events with data, or to the end of the connection, whole or cut."""
    assert 200 == stream.status, await stream.read_body()
    num_before = read.num_events
    try:
        while max_events is None or read.num_events - num_before < max_events:
            read.take(await stream.next_data())
    except ConnectionCut:
        pass
    return read
