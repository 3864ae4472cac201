"""A prefill worker from its parts: table, engine thread, senders, session. Nothing here decides anything."""

import asyncio
import os
import random
from contextlib import AsyncExitStack

from prefill_worker.config import PrefillConfig
from prefill_worker.sender import TransferSenders
from prefill_worker.service import PrefillService
from shared.aio.backoff import Backoff
from shared.aio.scope import spawn, stop_when
from shared.codec.kv import layout_to_wire
from shared.domain.ids import WorkerId
from shared.domain.request import Role
from shared.engine.build import Engine
from shared.engine.prefill_runner import PrefillCommand, PrefillRunner, PrefillStep
from shared.engine.step_loop import StepLoop
from shared.kv.block_pool import BlockPool
from shared.process import Process
from shared.rpc.channels import ChannelPool
from shared.rpc.server import serve
from shared.rpc.worker_life import EngineDied, WorkerLife, scheduler_locator
from shared.rpc.worker_session import REDIAL_INITIAL_S, REDIAL_MAX_S, WorkerIdentity, WorkerSession
from shared.transfer.copier import Copier
from shared.transfer.handshake import FALLBACK_REASONS, SHM, Introductions
from shared.transfer.host_proof import HostProof
from shared.transfer.staging import StagingPool

SWEEP_S = 0.25  # a deadline is to be kept to a fraction of a second


async def run_worker(process: Process, config: PrefillConfig, engine: Engine) -> None:
    """Returns after the drain that `process.stopping` begins. Raises EngineDied."""
    layout = engine.memory.layout
    token = config.cluster_token.get_secret_value()
    service = PrefillService(
        layout=layout,
        pool=BlockPool(engine.memory.num_blocks),
        max_sequences=config.max_sequences,
        clock=process.clock,
        metrics=process.metrics,
        log=process.log,
    )
    life = WorkerLife(process, service, drain_timeout_s=config.drain_timeout_s)
    runner = PrefillRunner(
        engine.executor,
        token_budget=config.token_budget,
        max_sequences=config.max_sequences,
        step_tokens=engine.step_tokens,
        tell_layers=lambda told: step_loop.tell(service.on_layers, told),
    )
    step_loop: StepLoop[PrefillCommand, PrefillStep] = StepLoop(
        runner,
        service.on_step,
        on_dead=life.on_engine_dead,
        clock=process.clock,
        fill_wait_s=config.prefill_fill_wait_ms / 1000,
        has_room=runner.has_room,
    )
    process.metrics.kv_blocks(service.block_counts)
    process.metrics.kv_transfers(transports=config.kv_transports, fallback_reasons=FALLBACK_REASONS)
    async with AsyncExitStack() as stack:
        copier = Copier()
        stack.callback(copier.close)
        staging = StagingPool()
        stack.callback(staging.close)
        proof = _host_proof(process, config.kv_transports)
        if proof is not None:
            stack.callback(proof.close)
        channels = ChannelPool(token)
        stack.push_async_callback(channels.close)
        locator = await stack.enter_async_context(scheduler_locator(config, process.clock))
        stack.push_async_callback(step_loop.stop)
        # Nobody calls a prefill worker; the server is there for its health, and so that its address is its own.
        server = await stack.enter_async_context(
            serve(lambda _: None, host=config.host, port=config.port, token=token, services=())
        )
        session = WorkerSession(
            identity=WorkerIdentity(
                role=Role.PREFILL,
                worker_id=WorkerId(process.name),
                incarnation=process.incarnation,
                address=server.address,
                admin_url=process.admin_url,
                pid=os.getpid(),
                layout=layout_to_wire(layout),
                num_blocks=engine.memory.num_blocks,
                max_sequences=config.max_sequences,
                token_budget=config.token_budget,
            ),
            handler=service,
            locate=locator.locate,
            channel_for=channels.get,
            backoff=Backoff(initial_s=REDIAL_INITIAL_S, max_s=REDIAL_MAX_S, random=random.random),
            clock=process.clock,
            metrics=process.metrics,
            log=process.log,
        )
        finished = asyncio.Event()
        is_drained = False
        async with stop_when(finished), asyncio.TaskGroup() as group:
            senders = TransferSenders(
                group=group,
                service=service,
                introductions=Introductions(
                    worker_id=WorkerId(process.name),
                    incarnation=process.incarnation,
                    layout=layout,
                    transports=config.kv_transports,
                    proof=proof,
                    channel_for=channels.get,
                    metrics=process.metrics,
                    log=process.log,
                ),
                incarnation=process.incarnation,
                memory=engine.memory,
                copier=copier,
                staging=staging,
                channel_for=channels.get,
                random=random.random,
                clock=process.clock,
                metrics=process.metrics,
                log=process.log,
            )
            service.connect(step_loop, session, senders)
            step_loop.start()
            spawn(group, session.run(), name="session")
            spawn(group, _sweep(service), name="sweep")
            is_drained = await life.run(session, server)
            finished.set()
    if not is_drained:
        raise EngineDied


async def _sweep(service: PrefillService) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        service.sweep()


def _host_proof(process: Process, transports: tuple[str, ...]) -> HostProof | None:
    """None where shared memory is not wanted, or the system has none: then it is not offered."""
    if SHM not in transports:
        return None
    try:
        return HostProof()
    except OSError as error:
        process.log.warning("no shared memory for KV", reason=error.strerror)
        return None
