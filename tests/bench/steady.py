"""How soon a system is up, and whether its memory stays where it is: `python tests/bench/steady.py [--requests N]`.

Starts a system of its own with the default model, prepared already, and a small KV pool; sends short requests, and prints
each process's resident memory, a worker's without its pool, at every tenth. What grows with history shows as a slope.
Fails above the limits.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Mapping
from pathlib import Path

from tests.support.cluster import Cluster, ClusterPlan
from tests.support.http_client import exchange
from tests.support.reference import default_model_dir

POOL_MIB = 64
MAX_START_S = 10.0  # from the command to the line that says ready
MAX_MIB = 512  # without the pool
MAX_GROWTH_MIB = 16  # from the second tenth to the last: allocators' slack, not a byte a request
PARALLEL = 8
NUM_SAMPLES = 10
ROLES = ("prefill", "decode", "gateway", "scheduler")


def resident_mib(pid: int) -> float:
    """Of a process, from the operating system."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(pid)


async def send(cluster: Cluster, number: int, rng: random.Random) -> None:
    """One short question; raises AssertionError unless it is answered."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": f"{rng.randrange(10**9)} {number}"}],
        "max_tokens": 2,
        "ignore_eos": True,
    }
    answer = await exchange(cluster.port, "POST", "/v1/chat/completions", body=body)
    assert 200 == answer.status, answer.body


async def sample(cluster: Cluster) -> dict[str, float]:
    """Role -> resident MiB, a worker's without its pool (all of which counts as touched)."""
    status = await cluster.status()
    taken: dict[str, float] = {}
    for role in ROLES:
        pool_mib = POOL_MIB if role in ("prefill", "decode") else 0
        taken[role] = resident_mib(status.one(role).live_pid) - pool_mib
    return taken


def problems(samples: list[Mapping[str, float]]) -> list[str]:
    """What is above its limit."""
    found: list[str] = []
    for role in ROLES:
        growth = samples[-1][role] - samples[1][role]
        if samples[-1][role] > MAX_MIB:
            found.append(f"{role} holds {samples[-1][role]:.0f} MiB, more than {MAX_MIB}")
        if growth > MAX_GROWTH_MIB:
            found.append(f"{role} has grown by {growth:.0f} MiB")
    return found


async def measure(cluster: Cluster, num_requests: int) -> list[Mapping[str, float]]:
    """A sample before the first request and after each tenth; prints a line a sample."""
    rng = random.Random(11)
    gate = asyncio.Semaphore(PARALLEL)
    samples: list[Mapping[str, float]] = []
    await cluster.wait_ready()

    async def one(number: int) -> None:
        async with gate:
            await send(cluster, number, rng)

    for part in range(NUM_SAMPLES + 1):
        if part:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one(number)) for number in range(num_requests // NUM_SAMPLES)]
            del tasks
        samples.append(await sample(cluster))
        told = "  ".join(f"{role} {mib:6.1f} MiB" for role, mib in samples[-1].items())
        print(f"{part * (num_requests // NUM_SAMPLES):6d} requests: {told}", flush=True)
    return samples


def main() -> None:
    """Runs it and exits with 1 when a limit is passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    num_requests: int = parser.parse_args().requests
    default_model_dir()
    begun = time.monotonic()
    with ClusterPlan().setting("KV_POOL_MIB", POOL_MIB).start() as cluster:
        start_s = time.monotonic() - begun
        print(f"up after {start_s:.1f} s, {start_s / MAX_START_S:.2f} of its limit", flush=True)
        samples = asyncio.run(measure(cluster, num_requests))
    found = problems(samples)
    if start_s > MAX_START_S:
        found.append(f"it took {start_s:.1f} s to be up, more than {MAX_START_S:g}")
    print("\n".join(found) if found else "steady: within its limits")
    raise SystemExit(bool(found))


if __name__ == "__main__":
    main()
