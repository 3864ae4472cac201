"""The second oracle: in the default numeric mode the system answers as one process alone does, token for token."""

import asyncio
import random
from collections.abc import Generator
from typing import Any

import pytest

from shared.domain.sampling import SamplingParams
from shared.model.numerics import NumericMode
from tests.support import leaks
from tests.support.chat import ask
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.oracle import MAX_TOKENS, Question, border_questions, questions
from tests.support.own_run import OwnRun

MODEL = "SmolLM2-135M-Instruct"
CHUNK_TOKENS = 64
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=["shm", "grpc"])
def system(request: pytest.FixtureRequest) -> Generator[Cluster]:
    """The default mode; KV by each transport."""
    with ClusterPlan().setting("transports", request.param).start() as cluster:
        yield cluster


def drawn(seed: int) -> SamplingParams:
    """Everything that looks at the logits or back at the answer."""
    return SamplingParams(
        temperature=0.9, top_p=0.95, top_k=200, seed=seed, presence_penalty=0.3, repetition_penalty=1.1
    )


def body(question: Question, sampling: SamplingParams) -> dict[str, Any]:
    """The request that asks for just that."""
    return {
        "model": MODEL,
        "messages": question.messages,
        "max_tokens": MAX_TOKENS,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }


async def crowd(cluster: Cluster, asked: list[tuple[Question, SamplingParams]], at_once: int) -> list[tuple[str, int]]:
    """Text and number of tokens of each, in a mixed order, so many under way at any time."""
    gate = asyncio.Semaphore(at_once)
    found: dict[int, tuple[str, int]] = {}

    async def one(place: int) -> None:
        async with gate:
            answer = await ask(cluster.port, body(*asked[place]))
            found[place] = answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]

    places = list(range(len(asked)))
    random.Random(at_once).shuffle(places)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(place)) for place in places]
    del tasks
    return [found[place] for place in range(len(asked))]


async def test_the_system_answers_as_one_process_alone(system: Cluster) -> None:
    """Greedy and drawn, prompts of all border lengths, 1 to 16 at once, cold and then from the prefix cache."""
    own = OwnRun.shared(NumericMode.Q4A16, CHUNK_TOKENS)
    greedy = SamplingParams(temperature=0.0, seed=0)
    kinds = [*questions(), *border_questions()]
    asked = [(question, greedy if place % 2 else drawn(place)) for place, question in enumerate(kinds)]
    expected = [own.answer(question.messages, MAX_TOKENS, sampling) for question, sampling in asked]
    await ask(system.port, body(*asked[0]))
    baseline = await leaks.capture(system)

    cold = await crowd(system, asked, at_once=16)
    warm = await crowd(system, asked, at_once=5)
    alone = await crowd(system, asked[::6], at_once=1)
    scraped = await system.role_metrics("prefill")

    assert expected == cold
    assert expected == warm
    assert expected[::6] == alone
    assert scraped[0].total("firsttoken_prefix_cache_tokens_total", result="hit") > 0
    await leaks.assert_no_leaks(system, baseline)
