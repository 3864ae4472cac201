"""The default chat model through the whole line: token for token what transformers makes of the same weights."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.support import leaks
from tests.support.cancelling import live_body, outcomes, wait_blocks_free, wait_for_state, wait_outcomes
from tests.support.chat import ask, collect, stream_chat
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.oracle import BORDER_LENGTHS, MAX_TOKENS, Question, border_questions, expected_answers, questions

MODEL = "SmolLM2-135M-Instruct"
CAPITAL = [{"role": "user", "content": "What is the capital of France?"}]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model_system() -> Generator[Cluster]:
    """Started once: loading the weights takes a while."""
    with ClusterPlan().start() as cluster:
        yield cluster


@pytest.fixture
async def model_cluster(model_system: Cluster) -> AsyncGenerator[Cluster]:
    """Warm before and without leaks after each test."""
    await ask(model_system.port, {"model": MODEL, "messages": CAPITAL, "max_tokens": 2})
    baseline = await leaks.capture(model_system)
    yield model_system
    await leaks.assert_no_leaks(model_system, baseline)


def greedy(messages: list[dict[str, str]], max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    """A body whose answer is decided by the weights alone."""
    return {"model": MODEL, "messages": messages, "max_tokens": max_tokens, "temperature": 0}


async def test_the_capital_of_france(model_cluster: Cluster) -> None:
    """With the official client, streamed and whole, by either name of the model, at temperature 0: Paris."""
    async with AsyncOpenAI(base_url=f"{model_cluster.base_url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = CAPITAL
        models = [model.id async for model in client.models.list()]
        whole = await client.chat.completions.create(model="default", messages=messages, max_tokens=32, temperature=0)
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=32,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert MODEL in models
    assert "Paris" in text
    assert text == whole.choices[0].message.content
    assert whole.usage == chunks[-1].usage
    assert MODEL == whole.model == chunks[0].model


async def answers(cluster: Cluster, asked: list[Question], *, at_once: int) -> list[tuple[str, int]]:
    """Text and number of tokens of each answer, with so many requests under way at any time."""
    gate = asyncio.Semaphore(at_once)

    async def one(question: Question) -> tuple[str, int]:
        async with gate:
            body = {**greedy(question.messages), "stream_options": {"include_usage": True}}
            record = await stream_chat(cluster.port, body)
            assert record.usage is not None
            assert question.num_prompt_tokens in (None, record.usage["prompt_tokens"])
            return record.text, record.usage["completion_tokens"]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(question)) for question in asked]
    return [task.result() for task in tasks]


async def test_equal_to_transformers(model_cluster: Cluster) -> None:
    """Oracle (1): short, long, Japanese, many turns, eight at once: token for token the same."""
    asked = questions()

    got = await answers(model_cluster, asked, at_once=8)

    assert len(asked) >= 20
    assert expected_answers(asked) == got


async def test_equal_to_transformers_alone(model_cluster: Cluster) -> None:
    """The same answers to a third of them without company: steps of one sequence."""
    asked = questions()[::3]

    assert expected_answers(asked) == await answers(model_cluster, asked, at_once=1)


async def test_prompt_lengths_around_borders(model_cluster: Cluster) -> None:
    """PDX-02: one less, equal and one more than whole blocks of 16 and whole chunks of 64."""
    asked = border_questions()
    assert list(BORDER_LENGTHS) == [question.num_prompt_tokens for question in asked]

    assert expected_answers(asked) == await answers(model_cluster, asked, at_once=4)


async def test_seeded_sampling_alone_and_in_a_crowd(model_cluster: Cluster) -> None:
    """A seeded answer is a function of its seed: the same alone, again, and beside others; another seed gives another."""

    def sampled(seed: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": "Tell me a story about a fox."}]
        return {**greedy(messages, 40), "temperature": 1.0, "top_p": 0.95, "seed": seed}

    alone = [(await stream_chat(model_cluster.port, sampled(seed))).text for seed in (1, 2)]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream_chat(model_cluster.port, sampled(seed))) for seed in (1, 2, 3, 4, 1, 2)]
    crowd = [task.result().text for task in tasks]

    assert alone == crowd[:2] == crowd[4:]
    assert 4 == len(set(crowd))


async def test_cancel_in_a_long_prefill(model_cluster: Cluster) -> None:
    """CAN-02: cut in the middle of a long prompt, all blocks are free after at most the chunk under way."""
    before = await outcomes(model_cluster)
    messages = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 250}]
    (start,) = await model_cluster.role_metrics("prefill")
    async with live_body(model_cluster, greedy(messages)) as stream:
        await wait_for_state(model_cluster, "prefilling")
        stream.cut()
        await wait_blocks_free(model_cluster, within_s=40.0)

    (end,) = await model_cluster.role_metrics("prefill")
    name = "firsttoken_tokens_computed_total"
    assert end.total(name) - start.total(name) < 1_500, "prefill went on after the cancel"
    await wait_outcomes(model_cluster, before, cancelled=1)


async def test_stop_strings_with_the_model(model_cluster: Cluster) -> None:
    """A stop string out of the answer's own text ends it right before."""
    whole = (await stream_chat(model_cluster.port, greedy(CAPITAL, 32))).text
    stop = whole[10:14]

    record = await stream_chat(model_cluster.port, {**greedy(CAPITAL, 32), "stop": [stop]})

    assert (whole[: whole.index(stop)], "stop") == (record.text, record.finish_reason)


async def test_too_long_for_the_model(model_cluster: Cluster) -> None:
    """A prompt longer than the window is refused with the window's size."""
    body = greedy([{"role": "user", "content": "word " * 10_000}])
    with pytest.raises(AssertionError, match="context_length_exceeded"):
        await ask(model_cluster.port, body)


async def test_nobody_holds_torch(model_cluster: Cluster) -> None:
    """By the kernel's own list of mapped files: on the `cpu` backend the workers do without it, too."""
    status = await model_cluster.status()

    def holds_torch(role: str) -> bool:
        return "libtorch" in Path(f"/proc/{status.one(role).live_pid}/maps").read_text()

    roles = ("gateway", "scheduler", "prefill", "decode")
    assert [False, False, False, False] == [holds_torch(role) for role in roles]


async def test_several_turns_and_a_system_message_streamed(model_cluster: Cluster) -> None:
    """A conversation is answered from all its turns, and what arrives first is the beginning of the whole answer."""
    messages = [
        {"role": "system", "content": "You answer in one word."},
        {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Blue."},
        {"role": "user", "content": "Name another one."},
    ]
    async with live_body(model_cluster, greedy(messages)) as stream:
        record = await collect(stream)

    answer = await ask(model_cluster.port, greedy(messages))
    assert record.text == answer["choices"][0]["message"]["content"] != ""


async def test_a_warm_answer_is_the_cold_one(model_cluster: Cluster) -> None:
    """Behind cached blocks, whole or in part, a token's probabilities are the same to the last bit; each start counted."""
    words = "Read this with care, please, and answer in one sentence: it is a text about an old house by a river. "
    words += "The river ran past the mill, and nobody who lived there could say how old the wheel was. " * 12
    longer, other = words + "What is this about?", words + "Name three colours, and a river in Asia."

    async def asked(content: str, salt: str) -> tuple[int, int, object]:
        body = greedy([{"role": "user", "content": content}], 12)
        answer = await ask(model_cluster.port, {**body, "logprobs": True, "top_logprobs": 3, "cache_salt": salt})
        assert answer["choices"][0]["logprobs"]["content"] != []
        usage = answer["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], answer["choices"]

    total, cold, expected = await asked(longer, "a")
    _, warm, again = await asked(longer, "a")
    other_total, other_cold, other_expected = await asked(other, "b")
    _, in_part, other_again = await asked(other, "a")

    assert (0, (total - 1) // 16 * 16, 0) == (cold, warm, other_cold)
    assert 0 < in_part < other_total - 16
    assert 0 != in_part % 64, "the first chunk behind the cached blocks is a whole one: the words must be others"
    assert expected == again
    assert other_expected == other_again
