"""Answers of the default model outlive the workers that make them: killed or stopped, the text is what it is without that."""

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support import leaks
from tests.support.audited import BACK_WITHIN_S
from tests.support.cancelling import holders, live_body, outcomes, wait_for_state, wait_outcomes
from tests.support.chat import ChatRecord, collect, stream_chat
from tests.support.cluster import Cluster, ClusterPlan, Service

ANSWER_WITHIN_S = 240.0
pytestmark = pytest.mark.timeout(900)

STORY: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "Write a long story about a river and a fox."}],
    "temperature": 0,
    "max_tokens": 120,
    "ignore_eos": True,
    "stream_options": {"include_usage": True},
}
LONG = {
    **STORY,
    "messages": [{"role": "user", "content": "The river and the fox. " * 150 + "Write the story."}],
    "max_tokens": 10,
}
SAMPLED = {"temperature": 0.9, "seed": 7, "repetition_penalty": 1.1}
STORIES = (STORY, {**STORY, **SAMPLED})
FAULTS = pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=lambda fault: fault.name)
LONG_PROMPTS = (LONG, {**LONG, **SAMPLED})


@dataclass(frozen=True, slots=True)
class ModelSystem:
    """Two workers a role with the default model, and what it answers when nothing happens."""

    cluster: Cluster
    stories: list[ChatRecord]
    long_prompts: list[ChatRecord]


@pytest.fixture(scope="module")
def model_system() -> Generator[ModelSystem]:
    """All is computed once: a story takes seconds."""
    with ClusterPlan().prefill(2).decode(2).start() as cluster:
        yield asyncio.run(undisturbed(cluster))


async def undisturbed(cluster: Cluster) -> ModelSystem:
    """Greedy and seeded with a penalty."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream_chat(cluster.port, body)) for body in (*STORIES, *LONG_PROMPTS)]
    answers = [task.result() for task in tasks]
    assert 4 == len({answer.text for answer in answers})
    return ModelSystem(cluster, answers[:2], answers[2:])


@pytest.fixture
async def model(model_system: ModelSystem) -> AsyncGenerator[ModelSystem]:
    """Idle before; ready, whole and without leaks after."""
    cluster = model_system.cluster
    await cluster.wait_ready(within_s=BACK_WITHIN_S)
    baseline = await leaks.capture(cluster)
    yield model_system
    await cluster.wait_ready(within_s=BACK_WITHIN_S)
    await leaks.assert_no_leaks(cluster, baseline)


def told(records: Sequence[ChatRecord]) -> list[tuple[str, str | None, object, object]]:
    """Text, end and counts; not what was cached, which another worker may not have had."""
    return [
        (each.text, each.finish_reason, (each.usage or {})["prompt_tokens"], (each.usage or {})["completion_tokens"])
        for each in records
    ]


@contextmanager
def struck(worker: Service, fault: signal.Signals) -> Generator[None]:
    """Killed, or stopped until the end."""
    os.kill(worker.live_pid, fault)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(worker.live_pid, signal.SIGCONT)


async def num_requeued(cluster: Cluster) -> float:
    """Attempts that were closed for a lost worker."""
    scheduler = (await cluster.status()).one("scheduler")
    return (await cluster.metrics(scheduler)).total("firsttoken_requeues_total", reason="worker_lost")


@FAULTS
async def test_the_default_model_goes_on_token_for_token(model: ModelSystem, fault: signal.Signals) -> None:
    """The decode worker that takes over replays what was said, and says the same as ever, counted once."""
    cluster = model.cluster
    before, requeued = await outcomes(cluster), await num_requeued(cluster)
    async with asyncio.timeout(ANSWER_WITHIN_S), AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(live_body(cluster, body)) for body in STORIES * 2]
        records = [await collect(stream, until_deltas=20) for stream in streams]
        stack.enter_context(struck((await holders(cluster, "decode"))[0], fault))
        async with asyncio.TaskGroup() as group:
            for stream, record in zip(streams, records, strict=True):
                group.create_task(collect(stream, record=record))
    assert told(model.stories * 2) == told(records)
    assert requeued < await num_requeued(cluster)
    await wait_outcomes(cluster, before, finished=len(records))


@FAULTS
async def test_a_prompt_of_the_default_model_is_computed_elsewhere(model: ModelSystem, fault: signal.Signals) -> None:
    """Its prefill worker is killed in mid-prompt, or stands still until the end; a story that decodes is not touched."""
    cluster = model.cluster
    before, requeued = await outcomes(cluster), await num_requeued(cluster)
    async with asyncio.timeout(ANSWER_WITHIN_S), AsyncExitStack() as stack:
        running = await stack.enter_async_context(live_body(cluster, STORY))
        story = await collect(running, until_deltas=5)
        salt = uuid.uuid4().hex
        streams = [
            await stack.enter_async_context(live_body(cluster, {**body, "cache_salt": salt})) for body in LONG_PROMPTS
        ]
        await wait_for_state(cluster, "prefilling")
        stack.enter_context(struck((await holders(cluster, "prefill"))[0], fault))
        async with asyncio.TaskGroup() as group:
            group.create_task(collect(running, record=story))
            reading = [group.create_task(collect(stream)) for stream in streams]
    assert told(model.long_prompts) == told([task.result() for task in reading])
    assert told(model.stories[:1]) == told([story])
    assert requeued < await num_requeued(cluster)
    await wait_outcomes(cluster, before, finished=3)
