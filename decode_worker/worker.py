"""A decode worker from its parts: table, engine thread, servers, session. Nothing here decides anything."""

import asyncio
import os
import random
from contextlib import AsyncExitStack

import grpc.aio

from decode_worker.config import DecodeConfig
from decode_worker.growth import PREEMPTION_CAUSES
from decode_worker.receiver import KvReceiver
from decode_worker.service import DecodeService
from decode_worker.tokens import DecodeTokens
from shared.aio.backoff import Backoff
from shared.aio.scope import spawn, stop_when
from shared.codec.kv import layout_to_wire
from shared.domain.ids import WorkerId
from shared.domain.request import Role
from shared.engine.build import Engine
from shared.engine.decode_runner import DecodeCommand, DecodeRunner, DecodeStep
from shared.engine.step_loop import StepLoop
from shared.kv.block_pool import BlockPool
from shared.process import Process
from shared.rpc.channels import ChannelPool
from shared.rpc.server import serve
from shared.rpc.worker_life import EngineDied, WorkerLife, scheduler_locator
from shared.rpc.worker_session import REDIAL_INITIAL_S, REDIAL_MAX_S, WorkerIdentity, WorkerSession
from shared.transfer.copier import Copier
from shared.transfer.handshake import Acquaintances
from shared.wire import decode_pb2_grpc, kv_pb2_grpc

SWEEP_S = 0.25  # leases last 10 s and more, but a deadline is to be kept to a fraction of a second
SERVICES = ("firsttoken.v1.KvTransfer", "firsttoken.v1.Decode")


async def run_worker(process: Process, config: DecodeConfig, engine: Engine) -> None:
    """Returns after the drain that `process.stopping` begins. Raises EngineDied."""
    layout = engine.memory.layout
    token = config.cluster_token.get_secret_value()
    service = DecodeService(
        worker_id=WorkerId(process.name),
        incarnation=process.incarnation,
        layout=layout,
        eos_ids=engine.executor.eos_ids,
        pool=BlockPool(engine.memory.num_blocks),
        max_sequences=config.max_sequences,
        outbox_tokens=config.outbox_tokens,
        outbox_bytes=config.outbox_bytes,
        shares_answers=engine.has_same_numerics,
        transports=config.kv_transports,
        clock=process.clock,
        metrics=process.metrics,
        log=process.log,
    )
    life = WorkerLife(process, service, drain_timeout_s=config.drain_timeout_s)
    step_loop: StepLoop[DecodeCommand, DecodeStep] = StepLoop(
        DecodeRunner(engine.executor), service.on_step, on_dead=life.on_engine_dead, clock=process.clock
    )
    process.metrics.kv_blocks(service.block_counts)
    process.metrics.sequences(service.sequence_counts, preemption_causes=PREEMPTION_CAUSES)
    process.metrics.outbox_tokens(lambda: service.num_outbox_tokens)
    async with AsyncExitStack() as stack:
        copier = Copier()
        stack.callback(copier.close)
        channels = ChannelPool(token)
        stack.push_async_callback(channels.close)
        locator = await stack.enter_async_context(scheduler_locator(config, process.clock))
        stack.push_async_callback(step_loop.stop)
        receiver = KvReceiver(
            service=service,
            acquaintances=Acquaintances(
                incarnation=process.incarnation, layout=layout, transports=config.kv_transports
            ),
            incarnation=process.incarnation,
            memory=engine.memory,
            copier=copier,
            metrics=process.metrics,
            log=process.log,
        )

        def add_servicers(server: grpc.aio.Server) -> None:
            kv_pb2_grpc.add_KvTransferServicer_to_server(receiver, server)
            decode_pb2_grpc.add_DecodeServicer_to_server(DecodeTokens(service, process.log), server)

        server = await stack.enter_async_context(
            serve(add_servicers, host=config.host, port=config.port, token=token, services=SERVICES)
        )
        process.metrics.open_calls(lambda: server.num_calls)
        session = WorkerSession(
            identity=WorkerIdentity(
                role=Role.DECODE,
                worker_id=WorkerId(process.name),
                incarnation=process.incarnation,
                address=server.address,
                admin_url=process.admin_url,
                pid=os.getpid(),
                layout=layout_to_wire(layout),
                num_blocks=engine.memory.num_blocks,
                max_sequences=config.max_sequences,
            ),
            handler=service,
            locate=locator.locate,
            channel_for=channels.get,
            backoff=Backoff(initial_s=REDIAL_INITIAL_S, max_s=REDIAL_MAX_S, random=random.random),
            clock=process.clock,
            metrics=process.metrics,
            log=process.log,
        )
        service.connect(step_loop, session, address=server.address)
        step_loop.start()
        finished = asyncio.Event()
        is_drained = False
        async with stop_when(finished), asyncio.TaskGroup() as group:
            spawn(group, session.run(), name="session")
            spawn(group, _sweep(service), name="sweep")
            is_drained = await life.run(session, server)
            finished.set()
    if not is_drained:
        raise EngineDied


async def _sweep(service: DecodeService) -> None:
    while True:
        await asyncio.sleep(SWEEP_S)
        service.sweep()
