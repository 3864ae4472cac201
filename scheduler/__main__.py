"""`python -m scheduler`: waits for the lease, then schedules until told to stop or replaced."""

import asyncio
import contextlib
import os

from grpc.aio import Server

from scheduler.config import SchedulerConfig
from scheduler.core import SchedulerCore
from scheduler.driver import Driver
from scheduler.messages import DrainStarted, RecordsFound
from scheduler.reaper import reap, take_over_records
from scheduler.service import Identity, SchedulerService
from scheduler.transcript import Transcript
from shared.aio.scope import cancel_and_wait, spawn, stop_when
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.request import Role, StoredRequest
from shared.process import Process, run
from shared.rpc.server import RunningServer, serve
from shared.state.cancellation import Cancellations
from shared.state.client import StateClient
from shared.state.leadership import Leadership
from shared.state.lease import LeaseKeeper, LeaseState
from shared.state.requests import RequestStore
from shared.wire import scheduler_pb2_grpc

SERVICE_NAME = "firsttoken.v1.Scheduler"
LOOK_AGAIN_S = 0.2  # a store that does not answer has been waited for before
# Short answers end under this scheduler; whatever lasts longer is adopted by the next one. New requests wait for it, at
# most 10 s, so that this must be short.
HAND_OVER_S = 2.0
FLUSH_S = 2.0  # for records on their way to Redis; one that is away has not answered in 0.5 s


class Replaced(Exception):
    """Another scheduler is the active one, or has been: this process must end, with code 1."""


async def main(process: Process, config: SchedulerConfig) -> None:
    """Raises Replaced; returns after a drain."""
    client = StateClient(config.redis_url, timeout_s=config.redis_timeout_s)
    service = SchedulerService(process.clock)

    def add_servicers(server: Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(service, server)

    try:
        async with serve(
            add_servicers,
            host=config.host,
            port=config.port,
            token=config.cluster_token.get_secret_value(),
            services=(SERVICE_NAME,),
        ) as server:
            process.metrics.open_calls(lambda: server.num_calls)
            leadership = Leadership(client, process.clock)
            keeper = LeaseKeeper(
                leadership,
                process.clock,
                holder=process.incarnation,
                address=server.address,
                absent_wait_s=config.lease_absent_s,
            )
            process.readiness.set(False, "waiting for the lease")
            async with stop_when(process.stopping):
                while True:
                    wait_s = await keeper.step()
                    if keeper.state is not LeaseState.STANDBY:
                        break
                    await asyncio.sleep(wait_s)
            if keeper.state is LeaseState.ACTIVE:
                try:
                    await _be_active(process, config, client, service, server, keeper)
                finally:
                    with contextlib.suppress(ServingError):  # Redis away: the lease ends by itself
                        await leadership.release(keeper.epoch_seen)
    finally:
        await client.close()


async def _be_active(
    process: Process,
    config: SchedulerConfig,
    client: StateClient,
    service: SchedulerService,
    server: RunningServer,
    keeper: LeaseKeeper,
) -> None:
    store, cancels = RequestStore(client), Cancellations(client)
    records = await _look_around(client, store, keeper)
    core = SchedulerCore(config.core_limits, keeper.epoch)
    folder = config.core_transcripts
    driver = Driver(
        core,
        store=store,
        marks=cancels,
        clock=process.clock,
        metrics=process.metrics,
        log=process.log,
        transcript=None if folder is None else Transcript(folder, keeper.epoch, config.core_limits),
    )
    process.metrics.requests(lambda: {state.value: count for state, count in core.ledger.num_by_state().items()})
    identity = Identity(name=Role.SCHEDULER.value, pid=os.getpid(), address=server.address, admin_url=process.admin_url)
    driver.step(RecordsFound(records=records))
    service.activate(driver, identity)
    async with asyncio.TaskGroup() as group:
        writes = spawn(group, driver.run(), name="driver")
        reaper = spawn(group, _reap_while_active(driver, keeper, cancels, store), name="reaper")
        replaced = spawn(group, _raise_when_resigned(driver, keeper), name="resignation")
        await server.set_serving(True)
        process.readiness.set(True)
        process.log.info("active", epoch=keeper.epoch, address=server.address)
        await process.stopping.wait()
        process.readiness.set(False, "draining")
        driver.step(DrainStarted())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(config.drain_timeout_s, HAND_OVER_S)):
                await driver.idle.wait()
        process.log.info("handing over", live=core.ledger.num_live())
        await cancel_and_wait(reaper)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_S):
                await driver.written.wait()
        service.deactivate()
        driver.hang_up()
        for task in (replaced, writes):
            await cancel_and_wait(task)


async def _look_around(client: StateClient, store: RequestStore, keeper: LeaseKeeper) -> tuple[StoredRequest, ...]:
    """What an earlier scheduler left, once Redis says so: it may go away again behind the lease that it has given."""
    while True:
        try:
            await client.check_eviction_policy()
            return await take_over_records(store, keeper.epoch)
        except ServingError as error:
            if error.code is not ErrorCode.STATE_UNAVAILABLE:
                raise
        await keeper.step()
        if keeper.state is not LeaseState.ACTIVE:
            raise Replaced("the lease is lost")
        await asyncio.sleep(LOOK_AGAIN_S)


async def _reap_while_active(driver: Driver, keeper: LeaseKeeper, cancels: Cancellations, store: RequestStore) -> None:
    await reap(driver, keeper, cancels, store)
    raise Replaced("the lease is lost")


async def _raise_when_resigned(driver: Driver, keeper: LeaseKeeper) -> None:
    await driver.resigned.wait()
    keeper.epoch_seen = driver.epoch_seen
    raise Replaced("someone has seen a higher epoch")


if __name__ == "__main__":
    run(Role.SCHEDULER.value, SchedulerConfig, main)
