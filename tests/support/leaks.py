"""The audit at the end of every cluster test: whatever a request took has been given back.

It asks each process for its counts, the operating system for files and shared memory, and Redis for its keys.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tests.support import processes
from tests.support.cluster import Cluster, Service
from tests.support.polling import eventually
from tests.support.redis_server import connect

WITHIN_S = 40.0  # a hang alone takes longer, on the busiest machine
# A process keeps up to 8 connections to Redis once that many calls were made at once, and a gRPC channel to each peer
# that it has met; the scrape that we count with is a connection too. A leak of one file a request shows in a crowd.
OPEN_FILES_SLACK = 12
WORKER_ROLES = ("prefill", "decode")
LIVE_BLOCK_STATES = ("reserved", "active", "quarantined")
KEY_PREFIX = "firsttoken:1:"
TERMINAL_STATES = ("finished", "cancelled", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """An idle system before the test. Workers are keyed by id: a restarted one is the same worker."""

    usable_blocks: Mapping[str, float]
    open_files: Mapping[str, int]
    shared_memory: frozenset[str]


async def capture(cluster: Cluster) -> Baseline:
    """The counts of a system that has become idle. Raises AssertionError if it does not."""
    await eventually(lambda: _unrest(cluster, None), lambda found: not found, within_s=WITHIN_S, what="idle before")
    status = await cluster.status()
    workers = [service for role in WORKER_ROLES for service in status.of_role(role)]
    return Baseline(
        usable_blocks={worker.id: await _usable_blocks(cluster, worker) for worker in workers},
        # Redis's own files are the other ends of connections that are counted where they are made.
        open_files={
            s.id: processes.open_files(s.live_pid)
            for s in (*status.services, *(await cluster.gateways()))
            if s.role != "redis"
        },
        shared_memory=frozenset(processes.shared_memory()),
    )


async def assert_no_leaks(cluster: Cluster, baseline: Baseline, *, within_s: float = WITHIN_S) -> None:
    """Raises AssertionError naming all that has not been given back in time."""
    await eventually(
        lambda: _unrest(cluster, baseline), lambda found: not found, within_s=within_s, what="everything given back"
    )


async def _usable_blocks(cluster: Cluster, worker: Service) -> float:
    """Free and cached ones: what a new request could get."""
    metrics = await cluster.metrics(worker)
    return sum(metrics.total("firsttoken_kv_blocks", state=state) for state in ("free", "cached"))


async def _unrest(cluster: Cluster, baseline: Baseline | None) -> list[str]:
    """All that keeps the system from being idle, or from being as it was at the baseline."""
    found: list[str] = []
    status = await cluster.status()
    if status.queue:
        found.append(f"queue {status.queue}")
    if status.live_requests:
        found.append(f"live requests {status.live_requests}")
    if status.unreleased:
        found.append(f"{status.unreleased} releases owed")
    if any(status.sequences.values()):
        found.append(f"sequences {status.sequences}")
    workers = [worker for role in WORKER_ROLES for worker in status.of_role(role)]
    if not status.of_role("scheduler") or not all(status.of_role(role) for role in WORKER_ROLES):
        found.append(f"not all roles are there: {status.services}")
    if baseline is not None and set(baseline.usable_blocks) != {worker.id for worker in workers}:
        found.append(f"workers {[worker.id for worker in workers]}")
        return found
    for worker in workers:
        found += await _worker_unrest(cluster, worker, baseline)
    gateways = await cluster.gateways()
    for gateway in gateways:
        found += await _gauge_unrest(cluster, gateway, "firsttoken_active_streams")
    if baseline is not None:
        found += _system_unrest([*(s for s in status.services if s.role != "gateway"), *gateways], baseline)
    # In a thread: it may be reached through a proxy that runs here.
    return found + await asyncio.to_thread(_redis_unrest, status.one("redis"))


async def _worker_unrest(cluster: Cluster, worker: Service, baseline: Baseline | None) -> list[str]:
    found: list[str] = []
    metrics = await cluster.metrics(worker)
    found += [
        f"{worker.id}: {count:g} blocks {state}"
        for state in LIVE_BLOCK_STATES
        if (count := metrics.total("firsttoken_kv_blocks", state=state))
    ]
    if baseline is not None:
        usable, before = await _usable_blocks(cluster, worker), baseline.usable_blocks[worker.id]
        if usable != before:
            found.append(f"{worker.id}: {usable:g} usable blocks, {before:g} before")
    if waiting := metrics.total("firsttoken_outbox_tokens"):
        found.append(f"{worker.id}: {waiting:g} tokens in outboxes")
    return found


async def _gauge_unrest(cluster: Cluster, service: Service, name: str) -> list[str]:
    samples = (await cluster.metrics(service)).all(name)
    assert samples, f"{service.id} does not export {name}"
    return [f"{service.id}: {name} is {sample.value:g}" for sample in samples if sample.value]


def _system_unrest(services: Sequence[Service], baseline: Baseline) -> list[str]:
    found: list[str] = []
    for service in services:
        if not service.pid or service.id not in baseline.open_files:
            continue
        count, before = processes.open_files(service.pid), baseline.open_files[service.id]
        if count > before + OPEN_FILES_SLACK:
            names = processes.open_file_names(service.pid)
            found.append(f"{service.id}: {count} open files, {before} before: {names}")
    if extra := processes.shared_memory() - baseline.shared_memory:
        found.append(f"/dev/shm: {sorted(extra)}")
    return found


def _redis_unrest(service: Service) -> list[str]:
    """Live records, and keys that would stay for ever."""
    found: list[str] = []
    with connect(f"redis://{service.address}/0") as client:
        for key in list(client.scan_iter(match=f"{KEY_PREFIX}*")):
            if -1 == client.ttl(key):
                found.append(f"Redis key {key} has no time to live")
            if key.startswith(f"{KEY_PREFIX}request:"):
                state = client.hget(key, "state")
                if state is not None and state not in TERMINAL_STATES:
                    found.append(f"Redis record {key} is {state}")
    return found
