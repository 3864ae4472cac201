"""Does to the system what a schedule says."""

import asyncio
import os
import signal
from contextlib import suppress
from dataclasses import dataclass, replace

import redis.exceptions

from shared.state.keys import LEASE
from tests.support import processes
from tests.support.chaos_links import Holders, child_id_of
from tests.support.chaos_schedule import ACTIVE_SCHEDULER, Fault, FaultKind
from tests.support.cluster import Cluster
from tests.support.redis_server import RedisServer, connect
from tests.support.tcp_proxy import TcpProxy

DRAINS_WITHIN_S = 60.0  # with its drain limit of some seconds, on a busy machine; what takes longer is a finding
LOOK_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The proxies, by the process that they stand in front of, or behind."""

    clients: dict[str, TcpProxy]
    redis: TcpProxy
    scheduler: dict[str, TcpProxy]


class Faults:
    """Faults of one target may overlap: each ends what it began."""

    def __init__(self, cluster: Cluster, redis: RedisServer, links: Links) -> None:
        self._cluster = cluster
        self._redis = redis
        self._links = links
        self._holders = Holders(cluster.pids)
        self._redis_lock = asyncio.Lock()  # a start that is being waited for must not be doubled

    async def apply(self, fault: Fault) -> Fault | None:
        """Returns when it is over; None where there was nothing to do it to, as that had just been killed."""
        target = await self._active_scheduler() if fault.target == ACTIVE_SCHEDULER else fault.target
        done = replace(fault, target=target)
        match fault.kind:
            case FaultKind.KILL:
                is_done = self._signal(self._pid_of(target), signal.SIGKILL)
            case FaultKind.FREEZE:
                is_done = await self._freeze(self._pid_of(target), fault.lasts_s)
            case FaultKind.TERMINATE:
                is_done = await self._terminate(self._pid_of(target))
            case FaultKind.REDIS_KILL:
                is_done = await self._restart_redis(fault.lasts_s)
            case FaultKind.REDIS_FREEZE:
                is_done = await self._freeze(self._redis.pid if self._redis.is_running else None, fault.lasts_s)
            case _:
                is_done = await self._spoil_link(done)
        return done if is_done else None

    async def _freeze(self, pid: int | None, lasts_s: float) -> bool:
        if not self._signal(pid, signal.SIGSTOP):
            return False
        try:
            await asyncio.sleep(lasts_s)
        finally:
            self._signal(pid, signal.SIGCONT)
        return True

    async def _terminate(self, pid: int | None) -> bool:
        """Until it has ended; raises AssertionError where it does not."""
        if pid is None or not self._signal(pid, signal.SIGTERM):
            return False
        try:
            async with asyncio.timeout(DRAINS_WITHIN_S):
                while processes.is_live(pid):
                    await asyncio.sleep(LOOK_S)
        except TimeoutError:
            raise AssertionError(
                f"{child_id_of(pid)} has not ended {DRAINS_WITHIN_S} s after SIGTERM\n{self._cluster.log_tail()}"
            ) from None
        return True

    async def _restart_redis(self, away_s: float) -> bool:
        async with self._redis_lock:
            if self._redis.is_running:
                await asyncio.to_thread(self._redis.kill)
        await asyncio.sleep(away_s)
        async with self._redis_lock:
            if not self._redis.is_running:
                await asyncio.to_thread(self._redis.start)
        return True

    async def _spoil_link(self, fault: Fault) -> bool:
        target = fault.target
        match fault.kind:
            case FaultKind.LINK_CUT | FaultKind.LINK_SLOW | FaultKind.LINK_SILENT:
                proxy, of = self._links.clients[target], ""
            case FaultKind.REDIS_LINK_CUT | FaultKind.REDIS_LINK_SLOW:
                proxy, of = self._links.redis, target
            case _:
                proxy, of = self._links.scheduler[target], ""
        if fault.delay_s:
            proxy.slow(fault.delay_s, of)
        elif fault.kind in (FaultKind.LINK_SILENT, FaultKind.SCHEDULER_LINK_SILENT):
            proxy.silence(of)
        else:
            proxy.cut(of)
        try:
            await asyncio.sleep(fault.lasts_s)
        finally:
            if fault.delay_s:
                proxy.slow(0.0, of)
            else:
                proxy.restore(of)
        return True

    async def _active_scheduler(self) -> str:
        """The holder of the lease; the one of `up` where Redis cannot say."""
        port = await active_scheduler_port(self._redis)
        return (self._holders.of(port) if port else "") or "scheduler-0"

    def _pid_of(self, child_id: str) -> int | None:
        """By the operating system's word: a process that has just started is not yet in any status."""
        return next((pid for pid in self._cluster.pids() if child_id_of(pid) == child_id), None)

    @staticmethod
    def _signal(pid: int | None, number: signal.Signals) -> bool:
        if pid is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
        return False


async def active_scheduler_port(server: RedisServer) -> int | None:
    """As the lease has it; None while there is none, or Redis does not answer."""

    def look() -> int | None:
        with connect(server.url, answers_within_s=1.0) as client, suppress(redis.exceptions.RedisError):
            address = client.hget(LEASE, "address")
            return None if address is None else int(address.rpartition(":")[2])
        return None

    return await asyncio.to_thread(look)
