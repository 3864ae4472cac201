"""Cached prompts through the whole line: what is counted as cached, who may share it, and that no answer shows it."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Generator
from typing import Any

import pytest

from tests.support import leaks
from tests.support.chat import ask, stream_chat
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.polling import eventually
from tests.support.script import Script, counting, padded

BLOCK, CHUNK = 16, 64
LOOKED_UP = "firsttoken_prefix_cache_tokens_total"


def new_salt() -> str:
    """One that no other test has used: nothing is cached under it."""
    return uuid.uuid4().hex


def two_blocks_alike(letter: str) -> Script:
    """5B+3 tokens; two of them differ from the end of the second block on."""
    start = '{"pieces": ["'
    return padded(["-" * (2 * BLOCK - len(start)) + letter, "b"], num_prompt_tokens=5 * BLOCK + 3)


async def usage_of(cluster: Cluster, script: Script, *, streamed: bool = True, **fields: Any) -> tuple[int, int]:
    """Prompt tokens and cached tokens of an answer that is exactly the script's."""
    if streamed:
        record = await stream_chat(cluster.port, script.body(stream_options={"include_usage": True}, **fields))
        text, usage = record.text, record.usage or {}
    else:
        answer = await ask(cluster.port, script.body(**fields))
        text, usage = answer["choices"][0]["message"]["content"], answer["usage"]
    assert script.text() == text
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("streamed", [True, False])
async def test_cached_tokens_are_what_prefill_did_not_compute(cluster: Cluster, streamed: bool) -> None:
    """USE-02: a prompt of 5B+3 tokens, again, and with another tail after 2B: 0, 5B, 2B; counted in the metrics too."""
    salt, total = new_salt(), 5 * BLOCK + 3
    (before,) = await cluster.role_metrics("prefill")
    asked = (two_blocks_alike("x"), two_blocks_alike("x"), two_blocks_alike("y"))

    usages = [await usage_of(cluster, script, streamed=streamed, cache_salt=salt) for script in asked]

    assert [(total, 0), (total, 5 * BLOCK), (total, 2 * BLOCK)] == usages
    (after,) = await cluster.role_metrics("prefill")
    grown = [
        after.total(LOOKED_UP, result=result) - before.total(LOOKED_UP, result=result) for result in ("hit", "miss")
    ]
    assert [7 * BLOCK, 3 * total - 7 * BLOCK] == grown
    computed = [metrics.total("firsttoken_tokens_computed_total") for metrics in (before, after)]
    assert 3 * total - 7 * BLOCK == computed[1] - computed[0]


async def test_salts_do_not_share(cluster: Cluster) -> None:
    """PFX-01: the same long prompt under two salts and none, each twice: nothing is cached at each first use."""
    script = padded([f"{new_salt()} ", "b"], num_prompt_tokens=20 * BLOCK + 1)
    fields: tuple[dict[str, Any], ...] = ({"cache_salt": new_salt()}, {"cache_salt": new_salt()}, {})

    first = [(await usage_of(cluster, script, **each))[1] for each in fields]
    second = [(await usage_of(cluster, script, **each))[1] for each in fields]

    # Without a salt the first block may be cached: other tests' scripts begin alike.
    assert [0, 0] == first[:2]
    assert first[2] <= BLOCK
    assert [20 * BLOCK] * 3 == second


@pytest.mark.parametrize("offset", [-1, 0, 1])
async def test_a_warm_answer_is_the_cold_one(cluster: Cluster, offset: int) -> None:
    """Lengths around blocks and chunks; each exact; the last token of a whole cached prompt is computed all the same."""
    lengths = [k * BLOCK + offset for k in (3, 4, 5, 8, 9, 16, 17)]
    salts = {length: new_salt() for length in lengths}

    async def cached(length: int) -> int:
        script = padded(["a ", "b", "c "], num_prompt_tokens=length)
        return (await usage_of(cluster, script, cache_salt=salts[length]))[1]

    for expected in ([0] * len(lengths), [(length - 1) // BLOCK * BLOCK for length in lengths]):
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(cached(length)) for length in lengths]
        assert expected == [task.result() for task in tasks]


async def test_answers_at_once_with_one_beginning(cluster: Cluster) -> None:
    """Some compute it side by side, others find it: every text is its own."""
    salt = new_salt()
    scripts = [
        Script(pieces=["-" * (10 * BLOCK), f"<{number}>", *(f"{number}.{n} " for n in range(20))])
        for number in range(24)
    ]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(usage_of(cluster, script, cache_salt=salt)) for script in scripts]

    # Alike are the start of the JSON, the dashes, and what leads to the number: 11 blocks and a little.
    assert {task.result()[1] for task in tasks} <= set(range(0, 11 * BLOCK + 1, BLOCK))
    total, cached = await usage_of(cluster, scripts[0], cache_salt=salt)
    assert (total - 1) // BLOCK * BLOCK == cached


@pytest.fixture(scope="module")
def small_system() -> Generator[Cluster]:
    """Pools of 1 MiB: 1,024 blocks."""
    with ClusterPlan().scripted().setting("kv_pool_mib", 1).start() as cluster:
        yield cluster


@pytest.fixture
async def small_cluster(small_system: Cluster) -> AsyncGenerator[Cluster]:
    """The one with small pools, audited."""
    await ask(small_system.port, counting(4).body())
    baseline = await leaks.capture(small_system)
    yield small_system
    await leaks.assert_no_leaks(small_system, baseline)


async def _num_evicted(cluster: Cluster) -> int:
    (prefill,) = await cluster.role_metrics("prefill")
    return int(prefill.total("firsttoken_prefix_cache_evictions_total"))


async def test_cached_blocks_give_way(small_cluster: Cluster) -> None:
    """Prompts of twice the pool in all: the oldest are evicted, counted and computed again; nothing is refused or wrong."""
    salt = new_salt()
    scripts = [padded([f"{number} ", "b"], num_prompt_tokens=250 * BLOCK + 1) for number in range(8)]

    before = await _num_evicted(small_cluster)
    first = [(await usage_of(small_cluster, script, cache_salt=salt))[1] for script in scripts]
    again = [(await usage_of(small_cluster, scripts[number], cache_salt=salt))[1] for number in (7, 0)]

    assert {0} == set(first) - {BLOCK}  # the beginning of a script
    assert 250 * BLOCK == again[0]
    assert again[1] <= BLOCK
    # Nine prompts of 251 blocks through 1,024 blocks, which earlier prompts may have left full.
    assert 1_000 <= await _num_evicted(small_cluster) - before <= 9 * 251
    status = await eventually(  # by the worker's next heartbeat
        small_cluster.status,
        lambda status: status.blocks["prefill"]["cached"] > 900,
        within_s=40.0,
        what="the blocks of the last prompt are cached",
    )
    assert 1_024 == sum(status.blocks["prefill"].values())
