"""What a streamed or whole answer said, checked for the rules that every answer keeps."""

import json
from dataclasses import dataclass, field
from typing import Any

from tests.support.http_client import HttpStream, exchange, open_request
from tests.support.sse_lines import Block

CHAT_PATH = "/v1/chat/completions"


@dataclass(slots=True, kw_only=True)
class ChatRecord:
    """One streamed answer."""

    request_id: str
    deltas: list[str] = field(default_factory=list)
    delta_times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    is_done: bool = False
    comments: list[Block] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    def take(self, block: Block) -> None:
        """Adds one block. Raises AssertionError if it breaks the order of a `/v1` stream or has a line it must not have."""
        if block.is_comment:
            self.comments.append(block)
            return
        assert {"data"} == {name for name, _ in block.fields if name}
        assert not self.is_done, "an event after [DONE]"
        data = block.data
        if data == "[DONE]":
            assert (self.finish_reason is None) != (self.error is None), "exactly one terminal before [DONE]"
            self.is_done = True
            return
        assert data is not None
        chunk = json.loads(data)
        self.chunks.append(chunk)
        assert self.error is None, "an event between the error and [DONE]"
        if "error" in chunk:
            assert self.finish_reason is None, "an error after the finish chunk"
            self.error = chunk["error"]
            return
        if not chunk["choices"]:
            assert self.finish_reason is not None, "usage before the finish chunk"
            assert self.usage is None, "two usage chunks"
            self.usage = chunk["usage"]
            return
        assert chunk.get("usage") is None, "usage outside the usage chunk"
        assert self.finish_reason is None, "a delta after the finish chunk"
        (choice,) = chunk["choices"]
        if content := choice["delta"].get("content"):
            self.deltas.append(content)
            self.delta_times.append(block.at)
        self.finish_reason = choice["finish_reason"]


async def collect(
    stream: HttpStream, *, until_deltas: int | None = None, record: ChatRecord | None = None
) -> ChatRecord:
    """Reads a stream to its end, or until it has given so many deltas. Raises AssertionError if it ends without [DONE]."""
    assert 200 == stream.status, await stream.read_body()
    record = record or ChatRecord(request_id=stream.headers["x-firsttoken-request"])
    if until_deltas is not None:
        while len(record.deltas) < until_deltas:
            record.take(await stream.next_data())
        return record
    async for block in stream.blocks():
        record.take(block)
    assert record.is_done, f"the stream ended without [DONE] after {len(record.deltas)} deltas"
    return record


async def stream_chat(port: int, body: dict[str, Any], **options: Any) -> ChatRecord:
    """Asks for a streamed answer and reads it to its end."""
    async with open_request(port, "POST", CHAT_PATH, body={**body, "stream": True}, **options) as stream:
        return await collect(stream)


async def ask(port: int, body: dict[str, Any], **options: Any) -> dict[str, Any]:
    """Asks for a whole answer. Raises AssertionError unless it is a success."""
    answer = await exchange(port, "POST", CHAT_PATH, body=body, **options)
    assert 200 == answer.status, answer.body
    return answer.json()
