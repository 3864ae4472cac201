"""The official client against the gateway: what it makes of our answers is what its users see."""

import asyncio
from typing import Any

import openai
import pytest

from shared.domain.errors import ErrorCode, ServingError
from tests.support.fake_backend import FakeBackend
from tests.support.gateway_app import RunningGateway, running_gateway
from tests.support.script import Script, counting


def client_of(running: RunningGateway) -> openai.AsyncOpenAI:
    """Without retries: each answer counts as it is."""
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0, timeout=20.0
    )


def messages_of(script: Script) -> Any:
    """The question."""
    return [{"role": "user", "content": script.message}]


async def test_a_whole_answer_is_read() -> None:
    """Text, finish reason, usage, and ids that belong together."""
    script = counting(12)
    async with running_gateway() as running, client_of(running) as client:
        answer = await client.chat.completions.create(
            model="default", messages=messages_of(script), temperature=0, max_completion_tokens=20, seed=1
        )

    assert script.text() == answer.choices[0].message.content
    assert "stop" == answer.choices[0].finish_reason
    assert answer.usage is not None
    assert (script.num_prompt_tokens, 13) == (answer.usage.prompt_tokens, answer.usage.completion_tokens)
    assert ("chat.completion", "scripted") == (answer.object, answer.model)
    (request_id,) = running.backend.requests
    assert f"chatcmpl-{request_id}" == answer.id


@pytest.mark.parametrize("include_usage", [False, True])
async def test_a_stream_is_read(include_usage: bool) -> None:
    """Every delta, one finish, usage exactly where it was asked for."""
    script = Script(pieces=["p\u2028q", "\u2029r\u0085", "s\u000bt", "日本語", "🙂"])
    options: Any = {"stream_options": {"include_usage": True}} if include_usage else {}
    async with running_gateway() as running, client_of(running) as client:
        stream = await client.chat.completions.create(
            model="scripted", messages=messages_of(script), max_tokens=20, stream=True, **options
        )
        chunks = [chunk async for chunk in stream]

    choices = [choice for chunk in chunks for choice in chunk.choices]
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]
    assert script.text() == "".join(choice.delta.content or "" for choice in choices)
    assert ["stop"] == [choice.finish_reason for choice in choices if choice.finish_reason]
    assert "assistant" == choices[0].delta.role
    assert ([6] if include_usage else []) == [usage.completion_tokens for usage in usages]
    assert 1 == len({chunk.id for chunk in chunks})


async def test_a_silent_stream_raises_nothing() -> None:
    """SSE-02: comments and their empty lines are no events, before the first chunk and between chunks."""
    backend = FakeBackend()
    backend.max_tokens_out = 2
    script = counting(4)
    async with running_gateway(backend, keep_alive_s=0.05) as running, client_of(running) as client:
        stream = await client.chat.completions.create(
            model="default", messages=messages_of(script), max_tokens=20, stream=True
        )
        texts: list[str] = []
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")
            if len(texts) == 3:  # role, w0, w1: now it is silent for a while
                asyncio.get_running_loop().call_later(0.3, backend.let_out, None)

    assert script.text() == "".join(texts)


async def test_an_error_in_a_stream_is_raised_with_its_message() -> None:
    """ERR-01: after the text that came before it."""
    backend = FakeBackend()
    backend.failure_after = (3, ServingError(ErrorCode.WORKER_LOST, "a worker was lost"))
    texts: list[str] = []
    async with running_gateway(backend) as running, client_of(running) as client:
        stream = await client.chat.completions.create(
            model="default", messages=messages_of(counting(9)), max_tokens=20, stream=True
        )
        with pytest.raises(openai.APIError) as caught:
            await _read_into(texts, stream)

    assert "a worker was lost" == caught.value.message
    assert "worker_lost" == caught.value.code
    assert counting(9).text(3) == "".join(texts)


async def _read_into(texts: list[str], stream: Any) -> None:
    async for chunk in stream:
        texts.append(chunk.choices[0].delta.content or "")  # noqa: PERF401 - what came before the error counts


async def test_refusals_have_the_clients_own_classes() -> None:
    """By status: bad request, not found, rate limit, server error; with code and param."""
    backend = FakeBackend()
    question = messages_of(counting(2))
    async with running_gateway(backend) as running, client_of(running) as client:
        with pytest.raises(openai.BadRequestError) as bad:
            await client.chat.completions.create(model="default", messages=question, temperature=5)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-9", messages=question)
        with pytest.raises(openai.BadRequestError) as long:
            await client.chat.completions.create(model="default", messages=question, max_tokens=2_000_000, stream=True)
        backend.refusal = ServingError(ErrorCode.OVERLOADED, "full")
        with pytest.raises(openai.RateLimitError):
            await client.chat.completions.create(model="default", messages=question)
        backend.refusal = ServingError(ErrorCode.STATE_UNAVAILABLE, "away")
        with pytest.raises(openai.InternalServerError) as away:
            await client.chat.completions.create(model="default", messages=question, stream=True)

    assert ("temperature", "invalid_value") == (bad.value.param, bad.value.code)
    assert ("model", "model_not_found") == (missing.value.param, missing.value.code)
    assert "context_length_exceeded" == long.value.code
    assert 503 == away.value.status_code


async def test_models_are_listed() -> None:
    """By the client's own paging, and one by name."""
    async with running_gateway() as running, client_of(running) as client:
        names = [model.id async for model in client.models.list()]
        single = await client.models.retrieve("default")

    assert ["scripted", "default"] == names
    assert "default" == single.id
