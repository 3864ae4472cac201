"""The official client against the gateway: what it makes of our answers is what its users see."""

import asyncio
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import TokenId
from shared.domain.sampling import SamplingParams
from shared.text.script import SCRIPTED_VOCAB_SIZE
from tests.support.fake_backend import FakeBackend
from tests.support.gateway_app import RunningGateway, running_gateway
from tests.support.script import Script, counting


def client_of(running: RunningGateway) -> openai.AsyncOpenAI:
    """Without retries: each answer counts as it is."""
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{running.port}/v1", api_key="none", max_retries=0, timeout=90.0
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


async def whole_answer(client: openai.AsyncOpenAI, **asked: Any) -> ChatCompletion:
    """With parameters that the client's many overloads cannot be told apart by."""
    create: Any = client.chat.completions.create
    return await create(**asked)


def logprobs_of(count: int) -> list[tuple[str, float, list[tuple[str, float]]]]:
    """What the backend makes up for the first tokens of `counting`, two likeliest each."""
    return [
        (f"w{place} ", -(place + 1) / 8, [(f"w{place} ", -(place + 1) / 8), ("A", -(place + 1) / 8 - 0.25)])
        for place in range(count)
    ]


def entries_of(content: Any) -> list[tuple[str, float, list[tuple[str, float]]]]:
    """The client's own objects."""
    for entry in content:
        assert entry.token.encode() == bytes(entry.bytes)
    return [
        (entry.token, entry.logprob, [(other.token, other.logprob) for other in entry.top_logprobs])
        for entry in content
    ]


async def test_log_probabilities_are_read_streamed_and_whole() -> None:
    """TXT-07: each token has its own, also where several come in one batch; both forms give the same; ends have none."""
    backend = FakeBackend()
    backend.batch = 3
    script = counting(7)
    asked: Any = {"model": "default", "max_tokens": 20, "logprobs": True, "top_logprobs": 2}
    async with running_gateway(backend) as running, client_of(running) as client:
        whole = await whole_answer(client, messages=messages_of(script), **asked)
        stream = await client.chat.completions.create(messages=messages_of(script), stream=True, **asked)
        chunks = [chunk async for chunk in stream]
        plain = await client.chat.completions.create(model="default", messages=messages_of(script), max_tokens=20)

    streamed = [
        (choice.delta.content, choice.logprobs) for chunk in chunks for choice in chunk.choices if choice.logprobs
    ]
    assert whole.choices[0].logprobs is not None
    assert logprobs_of(7) == entries_of(whole.choices[0].logprobs.content)
    assert logprobs_of(7) == [entry for _, logprobs in streamed for entry in entries_of(logprobs.content)]
    assert [f"w{place} " for place in range(7)] == [content for content, _ in streamed]
    assert None is plain.choices[0].logprobs


async def test_several_answers_are_read_streamed_and_whole() -> None:
    """n = 3: choices by number, one id, usage once, completion tokens of all and the prompt's once."""
    script = counting(6)
    asked: Any = {"model": "default", "max_tokens": 20, "n": 3, "seed": 5}
    async with running_gateway() as running, client_of(running) as client:
        whole = await whole_answer(client, messages=messages_of(script), **asked)
        stream = await client.chat.completions.create(
            messages=messages_of(script), stream=True, stream_options={"include_usage": True}, **asked
        )
        chunks = [chunk async for chunk in stream]

    texts = ["", "", ""]
    finishes: list[tuple[int, str]] = []
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason is not None:
            finishes.append((choice.index, choice.finish_reason))
    usages = [chunk.usage for chunk in chunks if chunk.usage is not None]

    assert [(0, script.text()), (1, script.text()), (2, script.text())] == [
        (choice.index, choice.message.content) for choice in whole.choices
    ]
    assert [script.text()] * 3 == texts
    assert [(0, "stop"), (1, "stop"), (2, "stop")] == sorted(finishes)
    assert [whole.usage] == usages
    assert (script.num_prompt_tokens, 21) == (usages[0].prompt_tokens, usages[0].completion_tokens)
    assert 1 == len({chunk.id for chunk in chunks})


async def test_all_of_sampling_passes_through_the_client() -> None:
    """Its own fields and those in `extra_body`, to the last bit."""
    async with running_gateway() as running, client_of(running) as client:
        await client.chat.completions.create(
            model="default",
            messages=messages_of(counting(2)),
            temperature=0.25,
            top_p=0.5,
            presence_penalty=-2,
            frequency_penalty=0.125,
            logit_bias={"7": 1, "300": -100},
            seed=3,
            extra_body={
                "top_k": 4,
                "min_p": 0.0625,
                "repetition_penalty": 1.1,
                "min_tokens": 2,
                "stop_token_ids": [5],
                "best_of": 1,
            },
        )

    assert (
        SamplingParams(
            temperature=0.25,
            top_p=0.5,
            top_k=4,
            min_p=0.0625,
            presence_penalty=-2.0,
            frequency_penalty=0.125,
            repetition_penalty=1.1,
            logit_bias=((TokenId(7), 1.0), (TokenId(300), -100.0)),
            min_tokens=2,
            stop_token_ids=(TokenId(5),),
            seed=3,
        )
        == running.backend.only.spec.sampling
    )


async def test_smp_03_a_bad_bias_harms_nobody() -> None:
    """400 that names the key, while another request streams on to its end; the next request works."""
    backend = FakeBackend()
    backend.max_tokens_out = 2
    script = counting(5)
    async with running_gateway(backend) as running, client_of(running) as client:
        stream = await client.chat.completions.create(
            model="default", messages=messages_of(script), max_tokens=20, stream=True
        )
        texts = [(await anext(stream)).choices[0].delta.content or "" for _ in range(3)]
        problems: list[str] = []
        for bias in ({str(SCRIPTED_VOCAB_SIZE): 1}, {"-1": 1}, {"word": 1}, {"7": 500}):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="default", messages=messages_of(script), logit_bias=bias)
            problems.append(caught.value.message)
        backend.let_out(None)
        await _read_into(texts, stream)
        after = await client.chat.completions.create(model="default", messages=messages_of(script), max_tokens=20)

    named = (f"'{SCRIPTED_VOCAB_SIZE}'", "'-1'", "'word'", "logit_bias.7")
    assert [True] * 4 == [name in problem for name, problem in zip(named, problems, strict=True)]
    assert script.text() == "".join(texts) == after.choices[0].message.content


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
