"""The default model with too few blocks: a preempted answer goes on with the very tokens that it has alone."""

import asyncio
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest

from tests.support import leaks
from tests.support.chat import ask
from tests.support.cluster import Cluster, ClusterPlan

MODEL = "SmolLM2-135M-Instruct"
NUM_TOKENS = 200
POOL_MIB = 40  # 56 blocks of 16 tokens in float32: three of the five answers at their ends
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["shm", "grpc"])
def small_system(request: pytest.FixtureRequest) -> Generator[Cluster]:
    """Small pools on both sides; KV by each transport."""
    plan = ClusterPlan().setting("kv_pool_mib", POOL_MIB).setting("transports", request.param)
    with plan.start() as cluster:
        yield cluster


@pytest.fixture
async def small_cluster(small_system: Cluster) -> AsyncGenerator[Cluster]:
    """Warm before and without leaks after."""
    await ask(small_system.port, body("Hello", max_tokens=2))
    baseline = await leaks.capture(small_system)
    yield small_system
    await leaks.assert_no_leaks(small_system, baseline)


def body(question: str, **fields: Any) -> dict[str, Any]:
    """Greedy and of fixed length unless told otherwise."""
    messages = [{"role": "user", "content": question}]
    defaults = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    return {"model": MODEL, "messages": messages, **defaults, **fields}


# Greedy and drawn, and what looks back at the tokens so far: a replay must bring that back too.
BODIES = [
    body("Tell me a long story about a lighthouse."),
    body("Describe the sea in many words.", temperature=1.0, seed=7),
    body("Name all animals that you know.", repetition_penalty=1.3),
    body("How does a clock work?", temperature=0.8, top_p=0.9, seed=8, presence_penalty=0.5, frequency_penalty=0.5),
    body("Write a poem about rain.", logprobs=True, top_logprobs=2),
]


async def answers(cluster: Cluster, asked: list[dict[str, Any]]) -> list[tuple[str, Any, int]]:
    """Text, log probabilities and length of each, asked for at once."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(cluster.port, each)) for each in asked]
    found: list[tuple[str, Any, int]] = []
    for task in tasks:
        answer = task.result()
        (choice,) = answer["choices"]
        found.append((choice["message"]["content"], choice.get("logprobs"), answer["usage"]["completion_tokens"]))
    return found


async def test_replay_makes_the_same_tokens(small_cluster: Cluster) -> None:
    """Five answers one after another, then all at once with room for three: some are preempted, none is different."""
    alone = [(await answers(small_cluster, [each]))[0] for each in BODIES]
    (before,) = await small_cluster.role_metrics("decode")
    together = await answers(small_cluster, BODIES)
    (after,) = await small_cluster.role_metrics("decode")

    assert alone == together
    assert [NUM_TOKENS] * len(BODIES) == [num_tokens for _, _, num_tokens in together]
    preempted = [each.total("firsttoken_preemptions_total", cause="blocks") for each in (before, after)]
    assert preempted[1] > preempted[0] == 0
    assert after.total("firsttoken_replayed_tokens_total") > 0
