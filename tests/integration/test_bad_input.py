"""Bad input ends before the queue: a 4xx with an OpenAI error object, never a 500, nothing left behind."""

import asyncio
import json
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from tests.support import leaks
from tests.support.cancelling import TWO_BUDGETS, live, wait_for_state
from tests.support.chat import CHAT_PATH, ask, collect
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.http_client import HttpAnswer, exchange
from tests.support.script import Script, counting, padded

EVENT_STREAM = {"Accept": "text/event-stream"}
POST_PATHS = (CHAT_PATH, "/api/chat")
BODY_LIMIT = 4 * 1024 * 1024
WINDOW = 1_000_000
QUEUE_LIMIT = 4


def assert_error(answer: HttpAnswer, status: int, code: str, *, kind: str = "invalid_request_error") -> dict[str, Any]:
    """The error object of a refusal. Raises AssertionError if it is not exactly an OpenAI error body."""
    assert status == answer.status, answer.body
    assert answer.headers["content-type"].startswith("application/json")
    document = answer.json()
    assert {"error"} == document.keys()
    error = document["error"]
    assert {"message", "type", "param", "code"} == error.keys()
    assert (kind, code) == (error["type"], error["code"])
    assert error["message"]
    return error


async def post(cluster: Cluster, body: Any, path: str = CHAT_PATH) -> HttpAnswer:
    """Accepts what both routes can give."""
    return await exchange(cluster.port, "POST", path, body=body, headers=EVENT_STREAM)


@pytest.mark.parametrize("path", POST_PATHS)
@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"not json", b"[]", b'"x"', b"7", b"null", b"true", b"\xff\xfe{}", b'{"a": NaN}', b"[" * 100_000],
    ids=["empty", "cut", "text", "list", "string", "number", "null", "true", "not utf-8", "nan", "deep"],
)
async def test_bodies_that_are_no_objects(cluster: Cluster, path: str, raw: bytes) -> None:
    """ERR-02: 400 with an error object on every route that takes a body."""
    answer = await exchange(cluster.port, "POST", path, raw_body=raw, headers=EVENT_STREAM)

    assert_error(answer, 400, "invalid_value")


WRONG_FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": "hello"}),
    ("messages", {"messages": None}),
    ("messages", {"messages": {"role": "user"}}),
    ("messages", {"messages": ["hello"]}),
    ("messages", {"messages": [{"content": "no role"}]}),
    ("messages", {"messages": [{"role": "king", "content": "x"}]}),
    ("messages", {"messages": [{"role": "user", "content": 7}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    ("temperature", {"temperature": "hot"}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": 2.1}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.5}),
    ("top_k", {"top_k": -1}),
    ("top_k", {"top_k": 1.5}),
    ("seed", {"seed": "x"}),
    ("stop", {"stop": ""}),
    ("stop", {"stop": ["a", ""]}),
    ("stop", {"stop": [1]}),
    ("stop", {"stop": ["x"] * 17}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -5}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": "ten"}),
    ("max_completion_tokens", {"max_tokens": None, "max_completion_tokens": 0}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": 7}),
    ("ignore_eos", {"ignore_eos": "yes"}),
    ("n", {"n": 9}),
    ("n", {"n": 0}),
    ("best_of", {"n": 2, "best_of": 3}),
    ("min_p", {"min_p": 1.5}),
    ("presence_penalty", {"presence_penalty": 3}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("logit_bias", {"logit_bias": {"word": 1}}),
    ("logit_bias", {"logit_bias": {"-1": 1}}),
    ("logit_bias", {"logit_bias": {"7": 500}}),
    ("min_tokens", {"min_tokens": 9, "max_tokens": 8}),
    ("stop_token_ids", {"stop_token_ids": [-1]}),
    ("tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("logprobs", {"logprobs": "yes"}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("model", {"model": 7}),
]


@pytest.mark.parametrize(("param", "change"), WRONG_FIELDS, ids=[json.dumps(change)[:50] for _, change in WRONG_FIELDS])
async def test_wrong_fields(cluster: Cluster, param: str, change: dict[str, Any]) -> None:
    """400 that names the field; the same for a streamed request, before any stream."""
    for stream in (False, True):
        body = {**counting(3).body(), "stream": stream, **change}

        error = assert_error(await post(cluster, body), 400, "invalid_value")

        assert (error["param"] or "").startswith(param)


async def test_missing_fields(cluster: Cluster) -> None:
    """A body without model or messages; a chat body with both forms of the question, or with none."""
    for path, body in (
        (CHAT_PATH, {"model": "default"}),
        (CHAT_PATH, {"messages": [{"role": "user", "content": "x"}]}),
        ("/api/chat", {}),
        ("/api/chat", {"message": "x", "messages": [{"role": "user", "content": "x"}]}),
    ):
        assert_error(await post(cluster, body, path), 400, "invalid_value")


@pytest.mark.parametrize(
    "message",
    ["hello", "[]", '{"pieces": 1}', '{"pieces": [{"hex": "zz"}]}', '{"pieces": ["a"], "surprise": 1}', "{}"],
)
async def test_scripts_that_cannot_be_played(cluster: Cluster, message: str) -> None:
    """The generator's own input is checked at the gateway: a bad script is the client's mistake."""
    body = {"model": "default", "messages": [{"role": "user", "content": message}], "max_tokens": 3}

    assert_error(await post(cluster, body), 400, "invalid_value")


async def test_unknown_model(cluster: Cluster) -> None:
    """404; of the name at most 64 characters come back."""
    error = assert_error(await post(cluster, counting(3).body(model="m" * 500)), 404, "model_not_found")

    assert "m" * 64 in error["message"]
    assert "m" * 65 not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_too_long_for_the_window(cluster: Cluster, stream: bool) -> None:
    """USE-01, ERR-01a: 400 before any stream, with the window and the prompt's tokens, never a negative number."""
    long = Script(pieces=["x" * (WINDOW + 100)])
    short = counting(3)
    for script, change in ((long, {"max_tokens": None}), (long, {"max_tokens": 10}), (short, {"max_tokens": WINDOW})):
        answer = await post(cluster, script.body(stream=stream, **change))

        error = assert_error(answer, 400, "context_length_exceeded")
        digits = error["message"].replace(",", "").replace("_", "")
        assert str(WINDOW) in digits
        assert str(script.num_prompt_tokens) in digits
        assert "-" not in digits.replace("max_tokens", "")


async def test_body_over_the_limit(cluster: Cluster) -> None:
    """413 with the limit named, whether the length is announced or the body is sent in chunks; the next is served."""
    too_big = json.dumps(Script(pieces=["x" * BODY_LIMIT]).body()).encode()
    announced = await exchange(cluster.port, "POST", CHAT_PATH, raw_body=too_big)
    chunked = b"%x\r\n%b\r\n0\r\n\r\n" % (len(too_big), too_big)
    headers = {"Transfer-Encoding": "chunked", "Content-Length": None}
    counted = await exchange(cluster.port, "POST", CHAT_PATH, raw_body=chunked, headers=headers)

    for answer in (announced, counted):
        assert str(BODY_LIMIT) in assert_error(answer, 413, "body_too_large")["message"]
    assert "w0 " == (await ask(cluster.port, counting(1).body()))["choices"][0]["message"]["content"]


async def test_a_body_just_under_the_limit(cluster: Cluster) -> None:
    """OPS-03: a prompt of nearly a million tokens passes every hop, above gRPC's default limit of 4 MiB as it may be."""
    script = Script(pieces=["start ", "y" * 900_000])

    answer = await ask(cluster.port, script.body())

    assert script.text() == answer["choices"][0]["message"]["content"]


async def test_unknown_paths_and_methods(cluster: Cluster) -> None:
    """Errors of the routing have the same shape."""
    assert_error(await cluster.get("/nowhere"), 404, "not_found")
    assert_error(await cluster.get("/v1/nowhere"), 404, "not_found")
    assert_error(await cluster.get(CHAT_PATH), 405, "method_not_allowed")
    assert_error(await exchange(cluster.port, "DELETE", "/v1/models"), 405, "method_not_allowed")


async def test_a_form_that_does_not_exist_yet(cluster: Cluster) -> None:
    """`/api/chat` without `Accept: text/event-stream` is 406."""
    answer = await exchange(cluster.port, "POST", "/api/chat", body={"message": counting(1).message})

    assert_error(answer, 406, "not_acceptable")


async def test_cancel_of_unknown_ids(cluster: Cluster) -> None:
    """CAN-04: 404 for an id that nobody has, with and without prefix; 400 for none."""
    unknown = "01ARZ3NDEKTSV4RRFFQ69G5FAV"
    for request_id in (unknown, f"chatcmpl-{unknown}", "r-", "%2E%2E"):
        assert_error(await cluster.delete(request_id), 404, "request_not_found")
    for path in ("/v1/requests/", "/v1/requests/chatcmpl-"):
        assert_error(await exchange(cluster.port, "DELETE", path), 400, "invalid_value")


async def test_unknown_fields_are_ignored(cluster: Cluster) -> None:
    """A field that nobody knows harms nothing; the harmless value of an unsupported one neither."""
    body = counting(2).body(surprise=1, user="u", n=1, tools=[], logprobs=False, response_format={"type": "text"})

    assert "w0 w1 " == (await ask(cluster.port, body))["choices"][0]["message"]["content"]


async def test_text_parts_are_joined(cluster: Cluster) -> None:
    """Parts of one message are one text, joined by newlines: here a script cut at a place where JSON allows one."""
    message = counting(2).message
    head, tail = message.split(" ", 1)
    parts = [{"type": "text", "text": head}, {"type": "text", "text": tail}]
    body = {"model": "default", "messages": [{"role": "user", "content": parts}], "max_tokens": 5}

    assert "w0 w1 " == (await ask(cluster.port, body))["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def small_system() -> Generator[Cluster]:
    """Pools of 1 MiB: 16,384 tokens of at most 64 bytes; a short queue."""
    plan = ClusterPlan().scripted().setting("kv_pool_mib", 1).setting("max_queued_requests", QUEUE_LIMIT)
    with plan.start() as cluster:
        yield cluster


@pytest.fixture
async def small_cluster(small_system: Cluster) -> AsyncGenerator[Cluster]:
    """The one with small pools, audited."""
    baseline = await leaks.capture(small_system)
    yield small_system
    await leaks.assert_no_leaks(small_system, baseline)


async def test_never_fits(small_cluster: Cluster) -> None:
    """SCH-01: what no pool can hold is refused at once with needed and available; the small one after it is served."""
    blocks = sum((await small_cluster.status()).blocks["decode"].values())
    too_many = blocks * 16 + 1

    for stream in (False, True):
        answer = await post(small_cluster, counting(3).body(max_tokens=too_many, stream=stream))
        error = assert_error(answer, 400, "exceeds_kv_capacity")
        assert any(character.isdigit() for character in error["message"])
    assert "w0 " == (await ask(small_cluster.port, counting(1).body()))["choices"][0]["message"]["content"]


async def test_without_max_tokens_an_answer_takes_what_the_pool_has(small_cluster: Cluster) -> None:
    """No max_tokens is never a refusal: the limit is then what is left of the window and of the largest pool."""
    body = counting(3).body()
    del body["max_tokens"]

    assert counting(3).text() == (await ask(small_cluster.port, body))["choices"][0]["message"]["content"]


async def test_requests_wait_for_blocks(small_cluster: Cluster) -> None:
    """Three requests of which each needs most of the pool are served one after the other, each with its exact text."""
    blocks = sum((await small_cluster.status()).blocks["decode"].values())
    script = counting(20, step_ms=5)
    body = script.body(max_tokens=blocks * 16 * 3 // 4)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(small_cluster.port, body)) for _ in range(3)]

    assert [script.text()] * 3 == [task.result()["choices"][0]["message"]["content"] for task in tasks]


async def test_a_full_queue_sheds(small_cluster: Cluster) -> None:
    """One more than the queue holds gets 429 with Retry-After at once; those in the queue keep their places."""
    # Nothing is placed beside it before half of it is computed, in ten seconds.
    holding = padded(["x"], num_prompt_tokens=2 * TWO_BUDGETS, prefill_ms=20_000)
    async with AsyncExitStack() as stack:
        holder = await stack.enter_async_context(live(small_cluster, holding))
        await wait_for_state(small_cluster, "prefilling")
        script = counting(5)
        queued = [await stack.enter_async_context(live(small_cluster, script)) for _ in range(QUEUE_LIMIT)]

        answer = await post(small_cluster, script.body())

        assert_error(answer, 429, "overloaded", kind="rate_limit_error")
        assert int(answer.headers["retry-after"]) >= 1
        holder.cut()
        assert [script.text()] * QUEUE_LIMIT == [(await collect(stream)).text for stream in queued]
