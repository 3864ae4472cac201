"""What a client's socket sees: headers at admission, keep-alives, one event a chunk, one terminal."""

import asyncio
import json
from itertools import pairwise
from statistics import median
from typing import Any

import pytest
from openai import APIError, AsyncOpenAI

from tests.support.chat import CHAT_PATH, collect, stream_chat
from tests.support.cluster import Cluster
from tests.support.http_client import exchange, open_request
from tests.support.script import Script, counting

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}


async def test_headers_and_keep_alives_before_the_first_token(cluster: Cluster) -> None:
    """R11: the headers come at admission; while prefill works, comments come each second; nothing is compressed."""
    script = counting(3, prefill_ms=3_500)
    clock = asyncio.get_running_loop()
    begun = clock.time()

    async with open_request(
        cluster.port,
        "POST",
        CHAT_PATH,
        body={**script.body(), "stream": True},
        headers={"Accept-Encoding": "gzip, br, zstd"},
    ) as stream:
        head_after = clock.time() - begun
        record = await collect(stream)

    assert STREAM_HEADERS == {name: stream.headers.get(name) for name in STREAM_HEADERS}
    assert "content-encoding" not in stream.headers
    assert head_after < 3.0
    assert record.delta_times[0] - begun >= 3.0
    times = [begun, *(comment.at for comment in record.comments if comment.at < record.delta_times[0])]
    times.append(record.delta_times[0])
    assert median(later - earlier for earlier, later in pairwise(times)) < 1.5
    assert len(times) > 3, "two comments before the first token"
    assert script.text() == record.text


async def test_keep_alives_between_tokens(cluster: Cluster) -> None:
    """SSE-02: the socket is never silent for longer than the setting (1 s here), also between tokens 2.5 s apart."""
    script = counting(3, step_ms=2_500)

    record = await stream_chat(cluster.port, script.body())

    times = sorted([*record.delta_times, *(comment.at for comment in record.comments)])
    assert median(later - earlier for earlier, later in pairwise(times)) < 1.5
    assert record.delta_times[-1] - record.delta_times[0] > 3.0, "the tokens were not apart"
    assert script.text() == record.text


async def test_tokens_are_readable_when_they_are_made(cluster: Cluster) -> None:
    """SSE-04: with compression on offer, an event is readable within 200 ms of its step of 150 ms.

    The median shows it: what is held back comes late or in bursts all the time, a busy machine is late now and then.
    """
    script = counting(10, step_ms=150)

    record = await stream_chat(cluster.port, script.body(), headers={"Accept-Encoding": "gzip, br, zstd"})

    gaps = [later - earlier for earlier, later in pairwise(record.delta_times)]
    assert 9 == len(gaps)
    assert 0.05 < median(gaps) < 0.15 + 0.2, gaps


@pytest.mark.parametrize("include_usage", [True, False, None])
async def test_usage_chunk(cluster: Cluster, include_usage: bool | None) -> None:
    """SSE-03: exactly one usage chunk, with no choices, after the finish chunk and before [DONE]; or none at all."""
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}

    record = await stream_chat(cluster.port, counting(20).body(max_tokens=5, **options))

    with_usage = [chunk for chunk in record.chunks if chunk.get("usage") is not None]
    if not include_usage:
        assert [] == with_usage
        return
    assert with_usage == record.chunks[-1:]
    assert [] == with_usage[0]["choices"]
    assert 5 == with_usage[0]["usage"]["completion_tokens"]
    assert "length" == record.chunks[-2]["choices"][0]["finish_reason"]


@pytest.mark.parametrize("step_ms", [30, 0])
async def test_failure_in_the_stream(cluster: Cluster, step_ms: int) -> None:
    """ERR-01: an engine failure at token 4 gives three tokens' text, one error event, [DONE], and no finish reason."""
    script = counting(10, fail_at=4, step_ms=step_ms)

    record = await stream_chat(cluster.port, script.body())

    assert script.text(3) == record.text
    assert step_ms == 0 or len(record.deltas) == 3, "tokens that are made apart come in deltas of their own"
    assert record.finish_reason is None
    assert record.error is not None
    assert {"message", "type", "param", "code"} == record.error.keys()
    assert "server_error" == record.error["type"]
    assert "w3" not in json.dumps(record.error)


@pytest.mark.parametrize("fail_at", [1, 2])
async def test_failure_of_a_whole_answer(cluster: Cluster, fail_at: int) -> None:
    """Token 1 fails in prefill, token 2 in decode: a whole answer is then a 500 with an error object, not half a text."""
    answer = await exchange(cluster.port, "POST", CHAT_PATH, body=counting(5, fail_at=fail_at).body())

    assert 500 == answer.status
    assert "server_error" == answer.json()["error"]["type"]


async def test_a_failing_request_harms_no_other(cluster: Cluster) -> None:
    """One sequence fails in the middle of a batch; the others end with their exact texts."""
    good = [counting(60, step_ms=5) for _ in range(4)]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream_chat(cluster.port, script.body())) for script in good]
        bad = group.create_task(stream_chat(cluster.port, counting(60, step_ms=5, fail_at=20).body()))

    assert [script.text() for script in good] == [task.result().text for task in tasks]
    assert 19 == len(bad.result().deltas)
    assert bad.result().error is not None


async def test_the_official_client(cluster: Cluster) -> None:
    """The openai package reads streamed and whole answers and raises its own error on one in the stream."""
    script = Script(pieces=["é", "\u2028", b"\xe6\xb0", b"\xb4"])
    failing = counting(6, fail_at=4, step_ms=30)
    async with AsyncOpenAI(base_url=f"{cluster.base_url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": script.message}]
        whole = await client.chat.completions.create(model="default", messages=messages, max_tokens=9)
        stream = await client.chat.completions.create(model="default", messages=messages, max_tokens=9, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        messages = [{"role": "user", "content": failing.message}]
        broken = await client.chat.completions.create(model="default", messages=messages, max_tokens=9, stream=True)
        seen = [(await anext(broken)).choices[0].delta.content or "" for _ in range(4)]  # one has the role
        with pytest.raises(APIError) as raised:
            await anext(broken)

    assert script.text() == whole.choices[0].message.content == "".join(pieces)
    assert "w0 w1 w2 " == "".join(seen)
    assert raised.value.message


async def named_events(cluster: Cluster, body: dict[str, Any]) -> list[tuple[str | None, Any]]:
    """The events of one `/api/chat` stream, comments left out."""
    headers = {"Accept": "text/event-stream"}
    async with open_request(cluster.port, "POST", "/api/chat", body=body, headers=headers) as stream:
        assert 200 == stream.status, await stream.read_body()
        assert STREAM_HEADERS == {name: stream.headers.get(name) for name in STREAM_HEADERS}
        blocks = [block async for block in stream.blocks() if not block.is_comment]
    return [(block.event, json.loads(block.data or "null")) for block in blocks]


async def test_named_events(cluster: Cluster) -> None:
    """`/api/chat`: delta events, then one done; both forms of the body; a failure is one error event and no done."""
    script = counting(5, step_ms=30)  # slow enough for a delta of its own for each token
    for question in ({"message": script.message}, {"messages": [{"role": "user", "content": script.message}]}):
        *deltas, last = await named_events(cluster, question)

        assert [("delta", {"delta": f"w{i} "}) for i in range(5)] == deltas
        assert "done" == last[0]

    events = await named_events(cluster, {"message": counting(5, fail_at=3, step_ms=30).message})

    assert ["delta", "delta", "error"] == [event for event, _ in events]


async def test_a_client_keeps_its_own_request_id(cluster: Cluster) -> None:
    """CAN-03: two live requests with one X-Request-Id are two requests: own answers, own ids, cancelled apart.

    (That no gauge falls below zero: assert_no_leaks.)
    """
    headers = {"X-Request-Id": "mine-1"}
    first, second = counting(200, step_ms=20), Script(pieces=[f"z{i} " for i in range(40)], step_ms=20)

    async with (
        open_request(cluster.port, "POST", CHAT_PATH, body={**first.body(), "stream": True}, headers=headers) as one,
        open_request(cluster.port, "POST", CHAT_PATH, body={**second.body(), "stream": True}, headers=headers) as two,
    ):
        begun = await collect(one, until_deltas=2)
        one.cut()
        again = await stream_chat(cluster.port, counting(3).body(), headers=headers)
        record = await collect(two)

    assert ["mine-1"] * 2 == [stream.headers.get("x-request-id") for stream in (one, two)]
    ids = {stream.headers["x-firsttoken-request"] for stream in (one, two)} | {again.request_id}
    assert 3 == len(ids)
    assert begun.text
    assert first.text().startswith(begun.text)
    assert second.text() == record.text
    assert counting(3).text() == again.text


async def test_an_id_of_the_house(cluster: Cluster) -> None:
    """Without an X-Request-Id of the client's the answer carries ours under both names."""
    async with open_request(cluster.port, "POST", CHAT_PATH, body=counting(1).body()) as stream:
        body = json.loads(await stream.read_body())

    assert stream.headers["x-firsttoken-request"] == stream.headers["x-request-id"]
    assert f"chatcmpl-{stream.headers['x-request-id']}" == body["id"]
