"""How long a cancel takes until every block is free: `python tests/bench/cancel_release.py [--model] [--cancels N]`.

Starts a system of its own, cancels requests by DELETE at random moments of their lives, and measures what the caller
sees: from sending DELETE to the answer that says that both workers have let go. A step that runs cannot be stopped, so
the limit is one step (decode) or one chunk (prefill), and 50 ms for everything else.
"""

import argparse
import asyncio
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.cancelling import live_body
from tests.support.chat import collect, stream_chat
from tests.support.cluster import Cluster, ClusterPlan
from tests.support.script import counting, padded

ALLOWANCE_S = 0.05
STEP_MS = 20
PREFILL_MS = 8_000
NUM_SCRIPTED_CHUNKS = 8 * 4  # 2,000 prompt tokens in chunks of 64
CHUNK_TOKENS = 64
PARALLEL = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A kind of request, how long one indivisible piece of its work takes, and when it is cancelled."""

    name: str
    body: Callable[[random.Random], dict[str, Any]]
    unit_s: float
    moments_s: tuple[float, float]
    parallel: int = PARALLEL


def long_question(rng: random.Random) -> dict[str, Any]:
    """About 850 prompt tokens that no two requests share."""
    words = " ".join(rng.choice(("river", "stone", "window", "letter", "garden", "winter")) for _ in range(800))
    return {"model": "default", "messages": [{"role": "user", "content": words}], "max_tokens": 200, "ignore_eos": True}


async def cancel_one(cluster: Cluster, case: Case, rng: random.Random) -> float | None:
    """Seconds from DELETE to its answer; None where the request had ended by itself."""
    clock = asyncio.get_running_loop()
    async with live_body(cluster, case.body(rng)) as stream:
        await asyncio.sleep(rng.uniform(*case.moments_s))
        begun = clock.time()
        answer = await cluster.delete(stream.headers["x-firsttoken-request"])
        took_s = clock.time() - begun
        if answer.status != 200 or answer.json()["outcome"] != "cancelled":
            print(f"  not counted: {answer.status} {answer.body!r}")
            return None
        await collect(stream)
        return took_s


async def measure(cluster: Cluster, case: Case, num_cancels: int) -> list[float]:
    """The seconds of every cancel that hit a live request."""
    rng = random.Random(7)
    gate = asyncio.Semaphore(case.parallel)

    async def one() -> float | None:
        async with gate:
            return await cancel_one(cluster, case, rng)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one()) for _ in range(num_cancels)]
    return [took for task in tasks if (took := task.result()) is not None]


def report(case: Case, seconds: Sequence[float]) -> None:
    """One line: the distribution, and its p99 as a ratio to the limit."""
    ordered = sorted(seconds)
    limit_s = case.unit_s + ALLOWANCE_S
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    print(
        f"{case.name}: n={len(ordered)} unit={case.unit_s * 1e3:.0f}ms p50={statistics.median(ordered) * 1e3:.1f}ms "
        f"p99={p99 * 1e3:.1f}ms max={ordered[-1] * 1e3:.1f}ms limit={limit_s * 1e3:.0f}ms p99/limit={p99 / limit_s:.2f}"
    )


async def run_scripted(cluster: Cluster, num_cancels: int) -> None:
    """Steps and chunks whose length the script says."""
    decoding = Case(
        name="scripted, decoding",
        body=lambda rng: counting(50, repeat=2_000, step_ms=STEP_MS).body(),
        unit_s=STEP_MS / 1e3,
        moments_s=(0.1, 0.6),
    )
    prefilling = Case(
        name="scripted, prefilling",
        body=lambda rng: padded(["x"], num_prompt_tokens=2_000, prefill_ms=PREFILL_MS).body(),
        unit_s=PREFILL_MS / 1e3 / NUM_SCRIPTED_CHUNKS,
        moments_s=(0.05, 1.0),
        parallel=1,
    )
    for case in (decoding, prefilling):
        report(case, await measure(cluster, case, num_cancels))


async def run_model(cluster: Cluster, num_cancels: int) -> None:
    """Steps and chunks as long as three undisturbed answers show them."""
    rng = random.Random(3)
    ttfts: list[float] = []
    gaps: list[float] = []
    prompt_tokens = 0
    for _ in range(3):
        begun = asyncio.get_running_loop().time()
        record = await stream_chat(cluster.port, {**long_question(rng), "stream_options": {"include_usage": True}})
        ttfts.append(record.delta_times[0] - begun)
        gaps += [after - before for before, after in zip(record.delta_times, record.delta_times[1:], strict=False)]
        prompt_tokens = (record.usage or {})["prompt_tokens"]
    chunk_s = statistics.median(ttfts) / -(-prompt_tokens // CHUNK_TOKENS)
    step_s = statistics.median(gaps)
    print(
        f"alone: prompt={prompt_tokens} TTFT={statistics.median(ttfts) * 1e3:.0f}ms chunk={chunk_s * 1e3:.0f}ms step={step_s * 1e3:.0f}ms"
    )
    prefilling = Case(
        name="model, prefilling",
        body=long_question,
        unit_s=chunk_s,
        moments_s=(0.1, statistics.median(ttfts) * 0.8),
        parallel=1,
    )
    shared = Case(
        name="model, four prompts at a time",
        body=long_question,
        unit_s=chunk_s,
        moments_s=(0.2, statistics.median(ttfts)),
        parallel=4,
    )
    decoding = Case(
        name="model, decoding",
        body=lambda rng: {**long_question(rng), "messages": [{"role": "user", "content": "Tell me a long story."}]},
        unit_s=step_s,
        moments_s=(0.5, 1.5),
        parallel=1,
    )
    for case in (prefilling, shared, decoding):
        report(case, await measure(cluster, case, num_cancels))


def main() -> None:
    """Start a system, measure, stop it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="store_true", help="with the default model in the scripted generator's place")
    parser.add_argument("--cancels", type=int, default=200, help="how many of each kind (default 200)")
    arguments = parser.parse_args()
    plan = ClusterPlan() if arguments.model else ClusterPlan().scripted()
    with plan.start() as cluster:
        run = run_model if arguments.model else run_scripted
        asyncio.run(run(cluster, arguments.cancels))


if __name__ == "__main__":
    main()
