"""The audit at the end of every cluster test: whatever a request took has been given back.

It asks each process for its counts, the operating system for files and shared memory, and Redis for its keys.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shared.state.client import MAX_CONNECTIONS
from shared.transfer.staging import MAX_IDLE_SEGMENTS
from tests.support import processes
from tests.support.cluster import Cluster, Service
from tests.support.metrics import Scrape
from tests.support.open_files import OpenFiles, open_files
from tests.support.polling import eventually
from tests.support.redis_server import connect

WITHIN_S = 40.0  # a hang alone takes longer, on the busiest machine
MAX_REDIS_CONNECTIONS = MAX_CONNECTIONS + 1  # as many calls at once, and who waits for cancel marks
MAX_IDLE_MEMORY = 2 * MAX_IDLE_SEGMENTS + 1  # a descriptor each, one that its map holds, and the proof of the host
# Of one stream of tokens between a gateway and a decode worker, on either side; it stays open for the next answers.
TASKS_A_PAIR = 4
LATE_FILES = 2  # of a library that opens one at its first use
PASSING_TASKS = 2  # a heartbeat, a lookup: they come and go
KEY_KINDS = frozenset({"cancel", "epoch", "lease", "log", "request"})
"""Of keys in Redis. Records and logs of what has ended stay for ten minutes; a cancel mark goes with its request."""
WORKER_ROLES = ("prefill", "decode")
LIVE_BLOCK_STATES = ("reserved", "active", "quarantined")
KEY_PREFIX = "firsttoken:1:"
TERMINAL_STATES = ("finished", "cancelled", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """An idle system before the test. Workers are keyed by id: a restarted one is the same worker."""

    usable_blocks: Mapping[str, float]
    counts: "Mapping[str, _Counts]"
    shared_memory: frozenset[str]
    num_marks: int
    """Of cancels, in Redis."""
    is_warm: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Of one process: what the operating system says, and what its metrics say."""

    files: OpenFiles
    tasks: float
    calls: float
    negative: frozenset[str]
    """Names of metrics below zero: something was given back twice (CAN-03)."""


async def capture(cluster: Cluster, *, is_warm: bool = False) -> Baseline:
    """The counts of a system that has become idle. Raises AssertionError if it does not.

    `is_warm`: every gateway has answered by every decode worker; then no stream between them may come on top, and no
    cancel mark may stay.
    """
    await eventually(lambda: _unrest(cluster, None), lambda found: not found, within_s=WITHIN_S, what="idle before")
    status = await cluster.status()
    workers = [service for role in WORKER_ROLES for service in status.of_role(role)]
    redis = status.one("redis")
    return Baseline(
        usable_blocks={worker.id: await _usable_blocks(cluster, worker) for worker in workers},
        counts={each.id: await _counts(cluster, each, redis) for each in await _processes(cluster)},
        shared_memory=frozenset(processes.shared_memory()),
        num_marks=(await asyncio.to_thread(_keys_by_kind, redis))["cancel"],
        is_warm=is_warm,
    )


async def _processes(cluster: Cluster) -> list[Service]:
    """All of ours. Redis's own files are the other ends of connections that are counted where they are made."""
    services = (await cluster.status()).services
    return [*(s for s in services if s.role not in ("gateway", "redis")), *(await cluster.gateways())]


async def _counts(cluster: Cluster, service: Service, redis: Service) -> _Counts:
    metrics: Scrape = await cluster.metrics(service)
    return _Counts(
        files=open_files(service.live_pid, redis_port=redis.port, admin_port=service.admin_port),
        tasks=metrics.total("firsttoken_tasks"),
        calls=metrics.total("firsttoken_open_calls"),
        negative=frozenset(sample.name for sample in metrics.samples if sample.value < 0),
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
        found += await _system_unrest(cluster, baseline, status.one("redis"))
    # In a thread: it may be reached through a proxy that runs here.
    return found + await asyncio.to_thread(_redis_unrest, status.one("redis"), baseline)


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


async def _system_unrest(cluster: Cluster, baseline: Baseline, redis: Service) -> list[str]:
    found: list[str] = []
    services = await _processes(cluster)
    for service in services:
        before = baseline.counts.get(service.id)
        if before is None:
            continue
        now = await _counts(cluster, service, redis)
        found += [f"{service.id}: {name} is below zero" for name in now.negative]
        for what, count, legal in _measures(service, services, before, now, is_warm=baseline.is_warm):
            if count > legal:
                names = "" if what in ("tasks", "calls") else f": {now.files.names}"
                found.append(f"{service.id}: {count:g} {what}, {legal:g} are legal{names}")
    if extra := processes.shared_memory() - baseline.shared_memory:
        found.append(f"/dev/shm: {sorted(extra)}")
    return found


def _measures(
    service: Service, services: Sequence[Service], before: _Counts, now: _Counts, *, is_warm: bool
) -> list[tuple[str, float, float]]:
    """What is counted, how much there is, how much may be: as before, and what a process keeps for the next request."""
    peer_role = {"gateway": "decode", "decode": "gateway"}.get(service.role)
    num_pairs = 0 if is_warm else sum(each.role == peer_role for each in services)
    idle_memory = MAX_IDLE_MEMORY if service.role == "prefill" else 0
    one_a_peer = len(services) - 1  # a channel to each process at most, or from it
    return [
        ("connections to Redis", now.files.redis, max(before.files.redis, MAX_REDIS_CONNECTIONS)),
        ("connections", now.files.connections, max(before.files.connections, one_a_peer)),
        ("segments", now.files.memory, max(before.files.memory, idle_memory)),
        ("other files", now.files.others, before.files.others + (0 if is_warm else LATE_FILES)),
        ("tasks", now.tasks, before.tasks + TASKS_A_PAIR * num_pairs + PASSING_TASKS),
        ("calls", now.calls, before.calls + num_pairs),
    ]


def _keys_by_kind(redis: Service) -> Counter[str]:
    with connect(f"redis://{redis.address}/0") as client:
        return Counter(key.removeprefix(KEY_PREFIX).partition(":")[0] for key in client.scan_iter(match="*"))


def _redis_unrest(service: Service, baseline: Baseline | None) -> list[str]:
    """Live records, marks of nobody, and keys that would stay for ever or that nobody knows."""
    found: list[str] = []
    kinds = _keys_by_kind(service)
    if unknown := kinds.keys() - KEY_KINDS:
        found.append(f"Redis keys {sorted(unknown)}")
    if baseline is not None and baseline.is_warm and kinds["cancel"] > baseline.num_marks:
        found.append(f"{kinds['cancel']} cancel marks in Redis, {baseline.num_marks} before")
    with connect(f"redis://{service.address}/0") as client:
        for key in list(client.scan_iter(match=f"{KEY_PREFIX}*")):
            if -1 == client.ttl(key):
                found.append(f"Redis key {key} has no time to live")
            if key.startswith(f"{KEY_PREFIX}request:"):
                state = client.hget(key, "state")
                if state is not None and state not in TERMINAL_STATES:
                    found.append(f"Redis record {key} is {state}")
    return found
