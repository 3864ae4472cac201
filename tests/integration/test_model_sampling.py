"""Sampling with the default model through both roles: log probabilities, several answers, penalties, end tokens."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest
from tokenizers import Tokenizer

from gateway.intake import child_seed
from tests.support import leaks
from tests.support.chat import ChatRecord, ask, stream_chat
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.reference import Reference, default_model_dir, reference_logprobs
from tests.support.torch_threads import one_torch_thread

MODEL = "SmolLM2-135M-Instruct"
FOX = [{"role": "user", "content": "Tell me a story about a fox."}]
HAIKU = [{"role": "user", "content": "Write a haiku about the sea. 海 🌊"}]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Generator[None]:
    """Of transformers, beside a running system: two that spin are many times slower."""
    with one_torch_thread():
        yield


@pytest.fixture(scope="module")
def model_system() -> Generator[Cluster]:
    """In float32, as transformers computes."""
    with ClusterPlan().setting("numeric_mode", "f32").start() as cluster:
        yield cluster


@pytest.fixture
async def model_cluster(model_system: Cluster) -> AsyncGenerator[Cluster]:
    """Warm before and without leaks after each test."""
    await ask(model_system.port, {"model": MODEL, "messages": FOX, "max_tokens": 2})
    baseline = await leaks.capture(model_system)
    yield model_system
    await leaks.assert_no_leaks(model_system, baseline)


def body(messages: list[dict[str, str]] = FOX, **fields: Any) -> dict[str, Any]:
    """Greedy, if not said otherwise."""
    return {"model": MODEL, "messages": messages, "max_tokens": 24, "temperature": 0, **fields}


def token_id(text: str) -> int:
    """Of a text that is one token."""
    (only,) = (
        Tokenizer.from_file(str(default_model_dir() / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    )
    return only


def entries_of(record: ChatRecord) -> list[dict[str, Any]]:
    """Of all chunks of a stream; each chunk's entries belong to its text."""
    entries: list[dict[str, Any]] = []
    for chunk in record.chunks:
        for choice in chunk["choices"]:
            content: list[dict[str, Any]] = choice["logprobs"]["content"] if choice["logprobs"] else []
            assert not content or choice["delta"]["content"]
            entries += content
    return entries


async def test_log_probabilities_are_those_of_transformers(model_cluster: Cluster) -> None:
    """Of every token, also of token 1 that prefill makes; the likeliest first; streamed and whole the same; whole bytes."""
    for messages in (FOX, HAIKU):
        asked = body(messages, logprobs=True, top_logprobs=3)
        record = await stream_chat(model_cluster.port, asked)
        (choice,) = (await ask(model_cluster.port, asked))["choices"]
        entries = entries_of(record)
        expected = reference_logprobs(default_model_dir(), Reference.shared().prompt_ids(messages), len(entries), 3)

        assert entries == choice["logprobs"]["content"]
        assert record.text == choice["message"]["content"]
        assert record.text.encode() == b"".join(bytes(entry["bytes"]) for entry in entries)
        assert len(entries) >= 8
        for entry, top in zip(entries, expected, strict=True):
            assert entry["token"] == entry["top_logprobs"][0]["token"]
            assert entry["logprob"] == entry["top_logprobs"][0]["logprob"]
            assert top == pytest.approx([other["logprob"] for other in entry["top_logprobs"]], abs=2e-3)


async def test_each_answer_of_several_is_that_of_its_seed(model_cluster: Cluster) -> None:
    """Choice k of n is what a request alone with the derived seed gets; one usage."""
    fields: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.02}
    together = await ask(model_cluster.port, body(n=3, seed=77, **fields))
    alone = [await ask(model_cluster.port, body(seed=child_seed(77, choice), **fields)) for choice in range(3)]

    assert [answer["choices"][0]["message"]["content"] for answer in alone] == [
        choice["message"]["content"] for choice in together["choices"]
    ]
    assert 3 == len({choice["message"]["content"] for choice in together["choices"]})
    assert alone[0]["usage"]["prompt_tokens"] == together["usage"]["prompt_tokens"]
    assert sum(answer["usage"]["completion_tokens"] for answer in alone) == together["usage"]["completion_tokens"]


async def test_smp_01_everything_at_once_is_the_same_in_a_crowd(model_cluster: Cluster) -> None:
    """A seeded request with cuts, penalties, bias and log probabilities: alone, and beside others of all kinds."""
    asked = body(
        temperature=0.9,
        seed=7,
        top_k=50,
        top_p=0.95,
        min_p=0.01,
        presence_penalty=0.4,
        frequency_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={str(token_id(" fox")): -2},
        min_tokens=24,
        logprobs=True,
        top_logprobs=2,
    )
    others = [
        body(),
        body(temperature=1.5),
        body(HAIKU, temperature=1.0, seed=3, top_p=0.5),
        body(repetition_penalty=2),
    ]
    alone = await stream_chat(model_cluster.port, asked)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream_chat(model_cluster.port, each)) for each in (*others, asked, *others)]
    crowded = tasks[len(others)].result()

    assert (alone.text, entries_of(alone)) == (crowded.text, entries_of(crowded))


async def test_the_repetition_penalty_is_that_of_transformers(model_cluster: Cluster) -> None:
    """SMP-02: prompt and output, from token 1 on, token for token in both roles."""
    for messages in (FOX, HAIKU):
        record = await stream_chat(model_cluster.port, body(messages, repetition_penalty=1.3))

        assert Reference.shared().greedy(messages, 24, repetition_penalty=1.3)[0] == record.text


async def test_presence_and_frequency_punish_what_was_generated(model_cluster: Cluster) -> None:
    """SMP-02: of two words that bias makes the only likely ones, the one in the prompt is not punished for it; each use
    counts.
    """
    first, second = token_id(" fox"), token_id(" story")
    bias = {str(first): 100, str(second): 99}
    plain = await ask(model_cluster.port, body(logit_bias=bias, max_tokens=4, logprobs=True, top_logprobs=2))
    (choice,) = plain["choices"]
    tops = [
        {other["token"]: other["logprob"] for other in entry["top_logprobs"]} for entry in choice["logprobs"]["content"]
    ]
    leads = [max(top.values()) - min(top.values()) for top in tops]
    punished = await ask(
        model_cluster.port,
        body(logit_bias=bias, max_tokens=2, presence_penalty=2, frequency_penalty=2, logprobs=True, top_logprobs=2),
    )
    lead_then = [
        {other["token"]: other["logprob"] for other in entry["top_logprobs"]}
        for entry in punished["choices"][0]["logprobs"]["content"]
    ]

    chosen = choice["logprobs"]["content"][0]["token"]
    other = next(token for token in tops[0] if token != chosen)
    assert leads[0] == pytest.approx(lead_then[0][chosen] - lead_then[0][other], abs=1e-3)
    assert tops[1][chosen] - tops[1][other] - 4.0 == pytest.approx(lead_then[1][chosen] - lead_then[1][other], abs=1e-3)


async def test_end_tokens_of_a_request(model_cluster: Cluster) -> None:
    """A token that bias makes certain: it comes when `min_tokens` lets it, ends the answer, counts, and has no text."""
    sure = token_id(" fox")
    asked = body(logit_bias={str(sure): 100}, stop_token_ids=[sure], min_tokens=3, logprobs=True)
    answer = await ask(model_cluster.port, asked)
    (choice,) = answer["choices"]

    assert ("stop", 4) == (choice["finish_reason"], answer["usage"]["completion_tokens"])
    assert 3 == len(choice["logprobs"]["content"])
    assert " fox" not in choice["message"]["content"]
    endless = await ask(model_cluster.port, body(logit_bias={str(sure): 100}, max_tokens=5))
    assert " fox" * 5 == endless["choices"][0]["message"]["content"]


async def test_smp_03_a_bias_beyond_the_vocabulary(model_cluster: Cluster) -> None:
    """Refused by its key while another streams on; the next request works."""
    async with asyncio.TaskGroup() as group:
        running = group.create_task(stream_chat(model_cluster.port, body()))
        with pytest.raises(AssertionError, match=r"logit_bias: .*49152.* is no token id below 49152"):
            await ask(model_cluster.port, body(logit_bias={"49152": 1}))

    assert running.result().text == (await stream_chat(model_cluster.port, body())).text
