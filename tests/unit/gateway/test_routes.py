"""Every route's edges over real sockets: what is refused, how, and that nothing is left behind."""

import asyncio
from typing import Any

import pytest

from gateway.request_id import new_request_id
from shared.domain.errors import ErrorCode, ServingError
from shared.wire import scheduler_pb2
from tests.support.chat import CHAT_PATH, ask
from tests.support.fake_backend import FakeBackend
from tests.support.gateway_app import running_gateway
from tests.support.http_client import HttpAnswer, exchange
from tests.support.script import counting

EVENTS = {"Accept": "text/event-stream"}
ERROR_KEYS = {"message", "type", "param", "code"}


def error_of(answer: HttpAnswer) -> dict[str, Any]:
    """The error object, after a look at its form."""
    assert "application/json" == answer.headers["content-type"]
    assert {"error"} == set(answer.json())
    assert ERROR_KEYS == set(answer.json()["error"])
    assert answer.headers["x-firsttoken-request"]
    return answer.json()["error"]


@pytest.mark.parametrize("path", [CHAT_PATH, "/api/chat"])
async def test_what_is_no_json_object_gets_400(path: str) -> None:
    """ERR-02: on every POST route; never 500, never 422, and the backend hears nothing."""
    bodies = [b"", b"[]", b'"x"', b"7", b"null", b"true", b"not json", b"[" * 50_000, b'{"a":' * 50_000, b"\xff"]
    async with running_gateway() as running:
        answers = [await exchange(running.port, "POST", path, raw_body=raw, headers=EVENTS) for raw in bodies]

    assert [400] * len(bodies) == [answer.status for answer in answers]
    assert {"invalid_request_error"} == {error_of(answer)["type"] for answer in answers}
    assert {} == running.backend.requests
    assert 0 == running.gateway.sessions.num_open


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_fields_get_their_status_before_any_stream(stream: bool) -> None:
    """404 for an unknown model, 400 with the field for a wrong one, and for a script that is none."""
    wrong = [
        ({"model": "gpt"}, 404, "model_not_found", "model"),
        ({"temperature": 9}, 400, "invalid_value", "temperature"),
        ({"max_tokens": 10**7}, 400, "context_length_exceeded", "max_tokens"),
        ({"messages": [{"role": "user", "content": "no script"}]}, 400, "invalid_value", "messages"),
    ]
    async with running_gateway() as running:
        for fields, status, code, param in wrong:
            body = {**counting(2).body(), "stream": stream, **fields}
            answer = await exchange(running.port, "POST", CHAT_PATH, body=body)
            assert (status, code, param) == (answer.status, error_of(answer)["code"], error_of(answer)["param"])


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("GET", "/docs", 404, "not_found"),
        ("GET", "/openapi.json", 404, "not_found"),
        ("GET", "/metrics", 404, "not_found"),
        ("POST", "/v1/chat/completions/", 404, "not_found"),
        ("POST", "/v1/completions", 404, "not_found"),
        ("GET", CHAT_PATH, 405, "method_not_allowed"),
        ("PUT", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/requests/x", 405, "method_not_allowed"),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
    ],
)
async def test_other_paths_and_methods_get_an_error_body(method: str, path: str, status: int, code: str) -> None:
    """In OpenAI's form, like all others."""
    async with running_gateway() as running:
        answer = await exchange(running.port, method, path)

    assert (status, code) == (answer.status, error_of(answer)["code"])
    assert (status == 405) == ("allow" in answer.headers)


async def test_both_names_of_the_model_are_listed() -> None:
    """And each can be asked for by its name."""
    async with running_gateway(served_model_name="Smol/LM") as running:
        listed = (await exchange(running.port, "GET", "/v1/models")).json()
        single = (await exchange(running.port, "GET", "/v1/models/Smol/LM")).json()
        alias = (await exchange(running.port, "GET", "/v1/models/default")).json()

    assert [single, alias] == listed["data"]
    assert ["Smol/LM", "default"] == [model["id"] for model in listed["data"]]
    assert {"model"} == {model["object"] for model in listed["data"]}


async def test_chat_without_a_named_event_stream_gets_406() -> None:
    """Until it has another form."""
    async with running_gateway() as running:
        answer = await exchange(running.port, "POST", "/api/chat", body={"message": counting(1).message})

    assert (406, "not_acceptable") == (answer.status, error_of(answer)["code"])


async def test_cancelling_what_is_unknown() -> None:
    """CAN-04: empty 400, no id at all 404, a well-formed unknown id 404; the scheduler hears the last one only.

    Each time by its own name, then by those that several answers to one question would have.
    """
    unknown = new_request_id(1)
    async with running_gateway() as running:
        statuses = [
            (await exchange(running.port, "DELETE", f"/v1/requests/{text}")).status
            for text in ("", "chatcmpl-", "r-1", "..%2fx", unknown, f"chatcmpl-{unknown}")
        ]

    assert [400, 400, 404, 404, 404, 404] == statuses
    heard = [unknown, *(f"{unknown}.{choice}" for choice in range(8))]
    assert sorted([*heard, *heard]) == sorted(running.backend.cancelled_ids)
    assert [unknown, unknown] == running.backend.cancelled_ids[::9]


async def test_a_release_that_is_still_owed_is_202() -> None:
    """Cancelled, with the count so far."""
    backend = FakeBackend()
    backend.cancel_reply = scheduler_pb2.CancelReply(
        released=False, outcome=scheduler_pb2.OUTCOME_KIND_CANCELLED, blocks_freed=1
    )
    async with running_gateway(backend) as running:
        await ask(running.port, counting(2).body())
        (request_id,) = backend.requests
        answer = await exchange(running.port, "DELETE", f"/v1/requests/{request_id}")

    assert (202, False, 1) == (answer.status, answer.json()["released"], answer.json()["blocks_freed"])


async def test_cancelling_without_a_scheduler_is_503() -> None:
    """Where no mark can be left either."""
    async with running_gateway(scheduler="127.0.0.1:9") as running:
        answer = await exchange(running.port, "DELETE", f"/v1/requests/{new_request_id(1)}")

    assert (503, "no_capacity") == (answer.status, error_of(answer)["code"])


async def test_ignored_fields_are_counted() -> None:
    """In a metric, by number alone: names are the client's."""
    async with running_gateway() as running:
        await ask(running.port, counting(2).body(user="u", nonsense=[1]))
        page = running.metrics.render().decode()

    assert "firsttoken_ignored_fields_total 2.0" in page


async def test_too_many_open_requests_are_shed() -> None:
    """One place only, taken: 429, and free again afterwards."""
    backend = FakeBackend()
    backend.may_place.clear()
    async with running_gateway(backend, max_open_requests=1) as running:
        async with asyncio.TaskGroup() as group:
            first = group.create_task(ask(running.port, counting(2).body()))
            await backend.arrived.wait()
            answer = await exchange(running.port, "POST", CHAT_PATH, body=counting(2).body())
            backend.may_place.set()
        await running.gateway.sessions.wait_idle()
        await ask(running.port, counting(2).body())

    assert (429, "overloaded") == (answer.status, error_of(answer)["code"])
    assert counting(2).text() == first.result()["choices"][0]["message"]["content"]


async def test_the_scheduler_may_refuse_a_request_that_never_fits() -> None:
    """Its words reach the client."""
    backend = FakeBackend()
    backend.refusal = ServingError(ErrorCode.NEVER_FITS, "needs 9 blocks, the largest pool has 4")
    async with running_gateway(backend) as running:
        answer = await exchange(running.port, "POST", CHAT_PATH, body=counting(2).body())

    assert (400, "exceeds_kv_capacity") == (answer.status, error_of(answer)["code"])
    assert "needs 9 blocks, the largest pool has 4" == error_of(answer)["message"]
