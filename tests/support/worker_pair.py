"""Workers in this process, between a scheduler and gateways that only do what a test says."""

import asyncio
import json
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, nullcontext, suppress
from itertools import islice
from typing import TypeAlias

from grpc import aio

from decode_worker import worker as decode
from decode_worker.config import DecodeConfig
from prefill_worker import worker as prefill
from prefill_worker.config import PrefillConfig
from shared.aio.scope import cancel_and_wait, spawn, stop_when
from shared.codec.request import key_from_wire, key_to_wire, spec_to_wire
from shared.domain.ids import Attempt, RequestId, RequestKey, TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.engine.build import Engine
from shared.engine.kv_digest import digest_layout
from shared.engine.scripted import ScriptedExecutor
from shared.kv.memory import KvMemory
from shared.process import Process, RealClock
from shared.rpc.channels import ChannelPool
from shared.rpc.server import serve
from shared.rpc.worker_life import EngineDied
from shared.text.script import Script
from shared.wire import common_pb2, decode_pb2, decode_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

TOKEN = "in-process"
EPOCH = 7
_WAIT_S = 60.0  # what runs here may share two busy cores with the start of other processes
transports = "shm,grpc"  # of pairs that are not told otherwise; the fixture `transport` sets it
_Context: TypeAlias = "aio.ServicerContext[scheduler_pb2.SessionUp, scheduler_pb2.SessionDown]"


def key_of(name: str, attempt: int = 1) -> RequestKey:
    """The (request, attempt) called `name`."""
    return RequestKey(RequestId(name), Attempt(attempt))


def scripted_spec(
    name: str,
    pieces: Sequence[str] = ("a", "b", "c"),
    *,
    max_tokens: int = 1000,
    num_prompt_tokens: int | None = None,
    has_stop_strings: bool = False,
    **settings: object,
) -> RequestSpec:
    """A request whose prompt is a script; blanks after it bring the prompt to `num_prompt_tokens`."""
    source = json.dumps({"pieces": list(pieces), **settings})
    if num_prompt_tokens is not None:
        assert len(source) <= num_prompt_tokens
        source = source.ljust(num_prompt_tokens)
    return RequestSpec(
        request_id=RequestId(name),
        prompt_ids=tuple(TokenId(byte) for byte in source.encode()),
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=1),
        has_stop_strings=has_stop_strings,
    )


def expected_ids(spec: RequestSpec) -> list[int]:
    """The whole answer to a scripted request, its end token included."""
    script = Script.from_prompt(spec.prompt_ids)
    length = script.num_scripted_tokens + 1 if script.eos else spec.max_tokens
    return list(islice(script.output_ids(), min(length, spec.max_tokens)))


class FakeScheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Greets workers, keeps what they say, sends what the test says."""

    def __init__(self) -> None:
        self.next_epochs: list[int] = []  # of the next sessions, instead of EPOCH
        self.acknowledges = True
        self.hellos: list[scheduler_pb2.WorkerHello] = []
        self.ups: dict[str, list[scheduler_pb2.SessionUp]] = defaultdict(list)
        self.sessions: dict[str, list[list[scheduler_pb2.SessionUp]]] = defaultdict(list)
        """The same, session by session; without their hellos."""
        self._contexts: dict[str, _Context] = {}
        self._epochs: dict[str, int] = {}
        self._writing = asyncio.Lock()
        self._hung_up: dict[str, asyncio.Event] = {}
        self._last_number: dict[str, int] = defaultdict(int)
        self._changed = asyncio.Condition()

    async def Session(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, _request_iterator: object, context: _Context
    ) -> None:
        """Until the worker goes."""
        hello = (await context.read()).hello
        worker_id = hello.worker_id
        epoch = self._epochs[worker_id] = self.next_epochs.pop(0) if self.next_epochs else EPOCH
        await context.write(scheduler_pb2.SessionDown(scheduler_epoch=epoch, welcome=scheduler_pb2.Welcome()))
        self._last_number[worker_id] = 0
        self._contexts[worker_id] = context
        hung_up = self._hung_up[worker_id] = asyncio.Event()
        heard: list[scheduler_pb2.SessionUp] = []
        self.sessions[worker_id].append(heard)
        async with self._changed:
            self.hellos.append(hello)
            self._changed.notify_all()
        async with stop_when(hung_up):
            await self._hear(worker_id, context, heard)

    async def _hear(self, worker_id: str, context: _Context, heard: list[scheduler_pb2.SessionUp]) -> None:
        while (up := await context.read()) is not aio.EOF:
            async with self._changed:
                heard.append(up)
                self.ups[worker_id].append(up)
                self._changed.notify_all()
            if up.WhichOneof("message") == "event" and self.acknowledges:
                await self.acknowledge(worker_id, up.event.number)

    async def acknowledge(self, worker_id: str, upto: int) -> None:
        """All events of the worker up to this number."""
        await self._down(worker_id, ack=scheduler_pb2.EventAck(upto=upto))

    async def _down(self, worker_id: str, **message: object) -> None:
        async with self._writing:  # grpc takes one message at a time
            down = scheduler_pb2.SessionDown(
                scheduler_epoch=self._epochs[worker_id],
                **message,  # pyright: ignore[reportArgumentType]
            )
            await self._contexts[worker_id].write(down)

    async def send(self, worker_id: str, key: RequestKey, **command: object) -> None:
        """One command by its field name, for example `abort=scheduler_pb2.Abort()`."""
        self._last_number[worker_id] += 1
        numbered = scheduler_pb2.Command(
            number=self._last_number[worker_id],
            key=key_to_wire(key),
            **command,  # pyright: ignore[reportArgumentType]
        )
        await self._down(worker_id, command=numbered)

    async def hang_up(self, worker_id: str) -> None:
        """Ends the session; the worker dials again."""
        self._hung_up[worker_id].set()

    def events(self, worker_id: str, key: RequestKey) -> list[scheduler_pb2.WorkerEvent]:
        """Told so far, repeats included."""
        wire = key_to_wire(key)
        return [up.event for up in self.ups[worker_id] if up.WhichOneof("message") == "event" and up.event.key == wire]

    async def event(self, worker_id: str, key: RequestKey, name: str) -> scheduler_pb2.WorkerEvent:
        """Waits for the first event of that name."""
        await self.until(lambda: any(event.WhichOneof("event") == name for event in self.events(worker_id, key)))
        return next(event for event in self.events(worker_id, key) if event.WhichOneof("event") == name)

    async def until(self, is_met: Callable[[], bool]) -> None:
        """Asks after every message of a worker."""
        async with asyncio.timeout(_WAIT_S), self._changed:
            await self._changed.wait_for(is_met)

    async def next_message(self) -> None:
        """Waits for anything from a worker; a heartbeat comes each second."""
        async with asyncio.timeout(_WAIT_S), self._changed:
            await self._changed.wait()

    def heartbeats(self, worker_id: str) -> list[scheduler_pb2.Heartbeat]:
        """Of its present session."""
        told = self.sessions[worker_id][-1]
        return [up.heartbeat for up in told if up.WhichOneof("message") == "heartbeat"]

    async def idle(self, worker_id: str, num_blocks: int) -> None:
        """Waits until nobody holds a block: by the last heartbeat, told when all commands so far had been taken."""

        def is_idle() -> bool:
            beats = self.heartbeats(worker_id)
            if not beats or beats[-1].commands_seen != self._last_number[worker_id]:
                return False
            return beats[-1].blocks["free"] + beats[-1].blocks["cached"] == num_blocks

        await self.until(is_idle)


class FakeGateway:
    """One Tokens stream. Keeps everything that comes down, acknowledges when told to."""

    def __init__(self, call: "aio.StreamStreamCall[decode_pb2.TokensUp, decode_pb2.TokensDown]") -> None:
        self.call = call
        self.ids: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, decode_pb2.End] = {}
        self.refused: list[decode_pb2.AttachRefused] = []
        self.num_batches = 0
        self.acks_at_once = True
        self.session = 0
        self._writing = asyncio.Lock()
        self._changed = asyncio.Condition()

    async def attach(self, key: RequestKey, ticket: bytes, from_index: int = 1, session: int = 0) -> None:
        """Read the attempt from here on. What is said later is of the highest session so far."""
        self.session = max(self.session, session)
        attach = decode_pb2.Attach(key=key_to_wire(key), from_index=from_index, ticket=ticket, session=session)
        await self._up(attach=attach)

    async def ack(self, key: RequestKey, index: int, *, session: int | None = None) -> None:
        """Tokens 1..index are delivered."""
        session = self.session if session is None else session
        await self._up(ack=decode_pb2.TokenAck(key=key_to_wire(key), index=index, session=session))

    async def finish(self, key: RequestKey, index: int, *, session: int | None = None) -> None:
        """A stop string was found."""
        await self._up(
            finish=decode_pb2.Finish(
                key=key_to_wire(key),
                index=index,
                reason=common_pb2.FINISH_REASON_STOP,
                session=self.session if session is None else session,
            )
        )

    async def until(self, is_met: Callable[[], bool]) -> None:
        """Asks after every message of the worker."""
        async with asyncio.timeout(_WAIT_S), self._changed:
            await self._changed.wait_for(is_met)

    async def ended(self, key: RequestKey) -> None:
        """Waits for the end of the answer."""
        await self.until(lambda: key.request_id in self.ends)

    async def read(self) -> None:
        """Runs beside the test until the stream ends, however it does; an acknowledgement may be the first to notice."""
        with suppress(aio.AioRpcError, aio.UsageError, asyncio.InvalidStateError, asyncio.CancelledError):
            await self._read()

    async def _read(self) -> None:
        while isinstance(down := await self.call.read(), decode_pb2.TokensDown):
            async with self._changed:
                self._take(down)
                self._changed.notify_all()
            if self.acks_at_once:
                for part in down.batch.sequences:
                    await self.ack(key_from_wire(part.key), part.first_index + len(part.ids) - 1)

    def _take(self, down: decode_pb2.TokensDown) -> None:
        if down.WhichOneof("message") == "refused":
            self.refused.append(down.refused)
            return
        self.num_batches += 1
        for part in down.batch.sequences:
            held = self.ids[part.key.request_id]
            assert part.first_index <= len(held) + 1, "a gap"
            del held[part.first_index - 1 :]
            held += part.ids
            if part.HasField("end"):
                self.ends[part.key.request_id] = part.end

    async def _up(self, **message: object) -> None:
        async with self._writing:  # grpc takes one message at a time
            await self.call.write(decode_pb2.TokensUp(**message))  # pyright: ignore[reportArgumentType]


class WorkerPair:
    """prefill-0 and decode-0 under one scheduler."""

    def __init__(self, scheduler: FakeScheduler, channels: ChannelPool, group: asyncio.TaskGroup) -> None:
        self.scheduler = scheduler
        self.channels = channels
        self._group = group
        self.transports = transports.split(",")
        self.scheduler_address = ""
        self._num_asked = 0
        self.settings: dict[str, object] = {}
        self.closing = ExitStack()  # what a test's own peers hold
        self.prefill = Process("prefill", "prefill-0", RealClock())
        self.decode = Process("decode", "decode-0", RealClock())

    def address(self, worker_id: str) -> str:
        """Of its newest start."""
        return next(hello.address for hello in reversed(self.scheduler.hellos) if hello.worker_id == worker_id)

    @asynccontextmanager
    async def another_start(self, role: str, *, port: int) -> AsyncGenerator[Process]:
        """Of the worker of this role, at this port; broken off at the end."""
        process = Process(role, f"{role}-0", RealClock())
        settings = {**self.settings, "port": port}
        if role == "decode":
            run = decode.run_worker(process, DecodeConfig.model_validate(settings), scripted_engine(1024))
        else:
            run = prefill.run_worker(process, PrefillConfig.model_validate(settings), scripted_engine(1024))
        task = spawn(self._group, run, name=f"{role}-0")
        try:
            incarnation = process.incarnation
            await self.scheduler.until(lambda: any(h.incarnation == incarnation for h in self.scheduler.hellos))
            yield process
        finally:
            await cancel_and_wait(task)
            process.metrics.close()

    async def gateway(self) -> FakeGateway:
        """A new stream to decode-0."""
        call = decode_pb2_grpc.DecodeStub(self.channels.get(self.address("decode-0"))).Tokens()
        gateway = FakeGateway(call)
        spawn(self._group, gateway.read(), name="gateway")
        return gateway

    async def ask(self, spec: RequestSpec, attempt: int = 1, delivered: Sequence[int] = ()) -> None:
        """Send Reserve to decode-0, whatever it will answer."""
        reserve = scheduler_pb2.Reserve(spec=spec_to_wire(spec), delivered_ids=delivered)
        await self.scheduler.send("decode-0", key_of(spec.request_id, attempt), reserve=reserve)

    async def reserve(
        self, spec: RequestSpec, attempt: int = 1, delivered: Sequence[int] = ()
    ) -> scheduler_pb2.Reserved:
        """Reserve on decode-0 and wait for its answer."""
        key = key_of(spec.request_id, attempt)
        await self.ask(spec, attempt, delivered)
        return (await self.scheduler.event("decode-0", key, "reserved")).reserved

    async def place(self, spec: RequestSpec, attempt: int = 1, delivered: Sequence[int] = ()) -> scheduler_pb2.Reserved:
        """Reserve, then give the job to prefill-0."""
        reserved = await self.reserve(spec, attempt, delivered)
        await self.start_prefill(spec, reserved, attempt, num_delivered=len(delivered))
        return reserved

    async def start_prefill(
        self, spec: RequestSpec, reserved: scheduler_pb2.Reserved, attempt: int = 1, *, num_delivered: int = 0
    ) -> None:
        """Give the job to prefill-0."""
        job = scheduler_pb2.Prefill(spec=spec_to_wire(spec), target=reserved.target, num_delivered=num_delivered)
        await self.scheduler.send("prefill-0", key_of(spec.request_id, attempt), prefill=job)

    async def release(self, worker_id: str, key: RequestKey, *, abort: bool = False) -> scheduler_pb2.Released:
        """Abort or Release, and the answer to it."""
        if abort:
            await self.scheduler.send(worker_id, key, abort=scheduler_pb2.Abort())
        else:
            await self.scheduler.send(worker_id, key, release=scheduler_pb2.Release())
        return (await self.scheduler.event(worker_id, key, "released")).released

    async def all_taken(self, worker_id: str) -> None:
        """Waits until it has taken all commands so far: they are taken in order, and a cancel of nobody is answered."""
        self._num_asked += 1
        await self.release(worker_id, key_of(f"nobody-{self._num_asked}"), abort=True)


def scripted_engine(num_blocks: int, *, chunk_tokens: int = 64, memory: KvMemory | None = None) -> Engine:
    """The scripted generator over a pool of so many blocks."""
    memory = memory or KvMemory(digest_layout(16), num_blocks)
    return Engine(executor=ScriptedExecutor(memory, chunk_tokens=chunk_tokens, clock=RealClock()), memory=memory)


async def _run_decode(
    process: Process, config: DecodeConfig, engine: Engine, ends_well: AbstractContextManager[object]
) -> None:
    with ends_well:
        await decode.run_worker(process, config, engine)


@asynccontextmanager
async def worker_pair(
    *,
    decode_engine: Engine | None = None,
    prefill_engine: Engine | None = None,
    with_prefill: bool = True,
    with_decode: bool = True,
    survives_engine_death: bool = False,
    **decode_settings: object,
) -> AsyncGenerator[WorkerPair]:
    """Both workers, connected; they drain and end when the body does."""
    scheduler = FakeScheduler()  # pyright: ignore[reportAbstractUsage] - workers call Session alone
    channels = ChannelPool(TOKEN)

    def add(server: aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(scheduler, server)

    async with serve(add, host="127.0.0.1", port=0, token=TOKEN, services=()) as server, asyncio.TaskGroup() as group:
        pair = WorkerPair(scheduler, channels, group)
        pair.scheduler_address = server.address
        common = pair.settings = {
            "scripted": True,
            "port": 0,
            "scheduler": server.address,
            "cluster_token": TOKEN,
            "drain_timeout_s": 0.2,
            "transports": transports,
        }
        config = DecodeConfig.model_validate({**common, **decode_settings})
        decoding = decode_engine or scripted_engine(1024)
        ends_well = suppress(EngineDied) if survives_engine_death else nullcontext()
        running: list[asyncio.Task[None]] = []
        if with_decode:
            running.append(spawn(group, _run_decode(pair.decode, config, decoding, ends_well), name="decode-0"))
        if with_prefill:
            prefilling = prefill_engine or scripted_engine(1024)
            prefill_config = PrefillConfig.model_validate(common)
            running.append(spawn(group, prefill.run_worker(pair.prefill, prefill_config, prefilling), name="prefill-0"))
        try:
            # By name: one whose session breaks at the start, on a busy machine, says hello again.
            await scheduler.until(lambda: len({hello.worker_id for hello in scheduler.hellos}) == len(running))
            yield pair
        finally:
            pair.decode.stopping.set()
            pair.prefill.stopping.set()
            if running:
                await asyncio.wait(running, timeout=_WAIT_S)
            await channels.close()
            pair.closing.close()
            pair.decode.metrics.close()
            pair.prefill.metrics.close()
