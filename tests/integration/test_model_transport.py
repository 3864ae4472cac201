"""The default model over each transport: the bits that arrive are those that were computed, so the answers are the same."""

import asyncio
from collections.abc import Mapping

import pytest

from tests.support.chat import ask
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.oracle import border_questions

MAX_TOKENS = 12
EVERY = 3  # of the lengths around block and chunk borders: each of -1, 0, +1 is among them
pytestmark = pytest.mark.timeout(600)


async def _answers(cluster: Cluster) -> list[object]:
    """Tokens with their log probabilities, to the last bit."""
    found: list[object] = []
    for question in border_questions()[::EVERY] + border_questions()[1::EVERY]:
        body: Mapping[str, object] = {
            "model": "default",
            "messages": question.messages,
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "logprobs": True,
        }
        answer = await ask(cluster.port, dict(body))
        found.append((answer["choices"], answer["usage"]["prompt_tokens"]))
    return found


async def _transports_used(cluster: Cluster) -> list[str]:
    (scraped,) = await cluster.role_metrics("prefill")
    samples = scraped.all("firsttoken_kv_transfer_bytes_total")
    return [sample.labels["transport"] for sample in samples if sample.value]


def test_answers_are_the_same_by_shared_memory_and_by_grpc() -> None:
    """Prompts around block and chunk borders; each system has used its own transport and no other."""
    found: list[list[object]] = []
    for transport in ("shm", "grpc"):
        with ClusterPlan().setting("transports", transport).start() as cluster:
            found.append(asyncio.run(_answers(cluster)))
            assert [transport] == asyncio.run(_transports_used(cluster))

    assert len(found[0]) >= 10
    assert found[0] == found[1]
