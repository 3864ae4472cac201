"""More answers than the KV pool holds: some leave and come back, and no client sees more of it than a pause."""

import asyncio
from collections.abc import AsyncGenerator, Generator

import pytest

from tests.support import leaks
from tests.support.chat import CHAT_PATH, ask, collect, stream_chat
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.http_client import open_request
from tests.support.metrics import Scrape
from tests.support.polling import eventually
from tests.support.script import Script, counting

PREEMPTIONS = "firsttoken_preemptions_total"
NUM_ANSWERS = 24
NUM_ROUNDS = 140  # with 7 pieces: 980 tokens, so that all answers together need half as much again as the pool has
BIG = "0123456789abcdef" * 256  # 4 KiB, so that the socket buffers on the way hold few tokens


@pytest.fixture(scope="module")
def small_system() -> Generator[Cluster]:
    """Pools of 1 MiB: 1,024 blocks of 16 tokens."""
    with ClusterPlan().scripted().setting("kv_pool_mib", 1).start() as cluster:
        yield cluster


@pytest.fixture
async def small_cluster(small_system: Cluster) -> AsyncGenerator[Cluster]:
    """The one with small pools, audited."""
    await ask(small_system.port, counting(4).body())
    baseline = await leaks.capture(small_system)
    yield small_system
    await leaks.assert_no_leaks(small_system, baseline)


async def decode_metrics(cluster: Cluster) -> Scrape:
    """Of the only decode worker."""
    (metrics,) = await cluster.role_metrics("decode")
    return metrics


def script_of(number: int) -> Script:
    """Each its own words, so that a token of another shows. It lasts for seconds: all are there before the first ends."""
    pieces = [f"{number}", *(f"-{number}{letter}" for letter in "abcde"), ". "]
    return Script(pieces=pieces, repeat=NUM_ROUNDS, step_ms=3)


async def test_more_answers_than_blocks(small_cluster: Cluster) -> None:
    """All at once: the younger make room for the older, come back by replay, and every text and count is exact."""
    before = await decode_metrics(small_cluster)
    scripts = [script_of(number) for number in range(NUM_ANSWERS)]
    bodies = [script.body(stream_options={"include_usage": True}) for script in scripts]

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stream_chat(small_cluster.port, body)) for body in bodies]

    for script, task in zip(scripts, tasks, strict=True):
        record = task.result()
        assert script.text() == record.text
        assert ("stop", script.num_pieces + 1) == (record.finish_reason, (record.usage or {})["completion_tokens"])
    after = await decode_metrics(small_cluster)
    assert after.total(PREEMPTIONS, cause="blocks") > before.total(PREEMPTIONS, cause="blocks")
    assert after.total("firsttoken_replayed_tokens_total") > before.total("firsttoken_replayed_tokens_total")


async def test_a_reader_that_stops_gives_its_blocks_back(small_cluster: Cluster) -> None:
    """After ten seconds with a full outbox it holds none; read again, the text is complete."""
    script = Script(pieces=[BIG, "end. "], repeat=900)
    before = (await decode_metrics(small_cluster)).total(PREEMPTIONS, cause="parked")
    body = {**script.body(), "stream": True}
    async with open_request(small_cluster.port, "POST", CHAT_PATH, body=body, receive_buffer=8_192) as stream:
        record = await collect(stream, until_deltas=1)
        await eventually(
            lambda: decode_metrics(small_cluster),
            lambda metrics: (
                metrics.total(PREEMPTIONS, cause="parked") > before
                and metrics.total("firsttoken_kv_blocks", state="active") == 0
            ),
            within_s=60.0,
            what="the parked sequence has left",
        )
        await collect(stream, record=record)

    assert script.text() == record.text
    assert "stop" == record.finish_reason
