"""Whatever goes wrong with a session, in whatever order, a worker dials again: there is no last try."""

import asyncio
import random
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeAlias

import grpc
import pytest
from grpc import aio

from shared.aio.backoff import Backoff
from shared.aio.scope import cancel_and_wait, spawn
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Epoch, Incarnation, WorkerId
from shared.domain.request import Role
from shared.obs.logs import get_logger
from shared.obs.metrics import Metrics
from shared.process import RealClock
from shared.rpc import worker_session
from shared.rpc.channels import ChannelPool
from shared.rpc.server import serve
from shared.rpc.worker_session import WorkerIdentity, WorkerSession
from shared.wire import common_pb2, scheduler_pb2, scheduler_pb2_grpc

_Context: TypeAlias = "aio.ServicerContext[scheduler_pb2.SessionUp, scheduler_pb2.SessionDown]"
_Down = scheduler_pb2.SessionDown
EPOCH = 5
NUM_FAULTS = 40
NOBODY = "127.0.0.1:9"  # discard: refused at once
AWAY_FAULTS = ("no address is known", "nobody is there")
SERVED_FAULTS = (
    "closed at once",
    "closed after the hello",
    "silent",
    "refused",
    "cancelled",
    "no welcome",
    "older epoch",
    "closed after the welcome",
    "broken while it writes",
    "cancelled while it writes",
)


class _Handler:
    """A worker that holds nothing, and a bug where a command comes."""

    def handle_command(self, command: scheduler_pb2.Command, epoch: Epoch) -> None:
        """None is sent before the last session."""
        raise AssertionError(command)

    def inventory(self) -> scheduler_pb2.Inventory:
        """Nothing."""
        return scheduler_pb2.Inventory()

    def heartbeat(self) -> scheduler_pb2.Heartbeat:
        """No counts."""
        return scheduler_pb2.Heartbeat()


class _Scheduler(scheduler_pb2_grpc.SchedulerServicer):
    """Commits one fault a try, the rest of the list being the tries to come; then behaves."""

    def __init__(self, faults: list[str], on_last: Callable[[], None]) -> None:
        self.faults = deque(faults)
        self._on_last = on_last
        self.committed: Counter[str] = Counter()
        self.is_whole = asyncio.Event()
        self.address = ""
        self._next = ""

    async def locate(self) -> str:
        """Before each try."""
        if not self.faults:
            self._on_last()
        self._next = self.faults.popleft() if self.faults else "none"
        if self._next in AWAY_FAULTS:
            self.committed[self._next] += 1
        if self._next == "no address is known":
            raise ServingError(ErrorCode.STATE_UNAVAILABLE, "no scheduler is known")
        return NOBODY if self._next == "nobody is there" else self.address

    async def Session(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, _request_iterator: object, context: _Context
    ) -> None:
        """One try."""
        fault = self._next
        self.committed[fault] += 1
        welcome = _Down(scheduler_epoch=EPOCH, welcome=scheduler_pb2.Welcome())
        match fault:
            case "closed at once":
                return
            case "closed after the hello":
                await context.read()
                return
            case "silent":
                await asyncio.Event().wait()
            case "refused":
                await context.abort(grpc.StatusCode.UNAVAILABLE, "not the active scheduler")
            case "cancelled":
                await context.abort(grpc.StatusCode.CANCELLED, "")
            case "no welcome":
                await context.write(_Down(scheduler_epoch=EPOCH, ack=scheduler_pb2.EventAck(upto=1)))
            case "older epoch":
                await context.write(welcome)
                await context.write(_Down(scheduler_epoch=EPOCH - 1, ack=scheduler_pb2.EventAck(upto=1)))
                await asyncio.Event().wait()
            case "closed after the welcome":
                await context.write(welcome)
                return
            case "broken while it writes" | "cancelled while it writes":
                await context.write(welcome)
                await context.read()
                code = grpc.StatusCode.UNAVAILABLE if fault.startswith("broken") else grpc.StatusCode.CANCELLED
                await context.abort(code, "")
            case _:
                await context.write(welcome)
                while (up := await context.read()) is not aio.EOF:
                    if up.WhichOneof("message") == "heartbeat":
                        self.is_whole.set()


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_worker_dials_again_whatever_has_gone_wrong(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty faults, every kind of them, then a scheduler that behaves: it gets the inventory and heartbeats."""
    monkeypatch.setattr(worker_session, "WELCOME_TIMEOUT_S", 0.3)
    dice = random.Random(seed)
    kinds = [*AWAY_FAULTS, *SERVED_FAULTS]
    faults = [*kinds, *dice.choices(kinds, k=NUM_FAULTS - len(kinds))]
    dice.shuffle(faults)

    def be_patient() -> None:  # with a scheduler that behaves, however slow it is
        monkeypatch.setattr(worker_session, "WELCOME_TIMEOUT_S", 120.0)

    scheduler = _Scheduler(faults, be_patient)  # pyright: ignore[reportAbstractUsage] - workers call Session alone
    metrics, channels = Metrics("decode", "decode-0"), ChannelPool("")

    def add(server: aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(scheduler, server)

    async with serve(add, host="127.0.0.1", port=0, token="", services=()) as server, asyncio.TaskGroup() as group:
        scheduler.address = server.address
        session = WorkerSession(
            identity=WorkerIdentity(
                role=Role.DECODE,
                worker_id=WorkerId("decode-0"),
                incarnation=Incarnation(1),
                address="host:1",
                admin_url="http://host:2",
                pid=42,
                layout=common_pb2.KvLayout(block_size=16),
                num_blocks=10,
                max_sequences=3,
            ),
            handler=_Handler(),
            locate=scheduler.locate,
            channel_for=channels.get,
            backoff=Backoff(initial_s=0.001, max_s=0.01, random=dice.random),
            clock=RealClock(),
            metrics=metrics,
            log=get_logger("test"),
        )
        session.post(scheduler_pb2.WorkerEvent(released=scheduler_pb2.Released()))
        running = spawn(group, session.run(), name="session")
        async with asyncio.timeout(120):
            await scheduler.is_whole.wait()
            while not session.is_established:  # the welcome may be on its way when the heartbeat has come
                await asyncio.sleep(0.005)
        await cancel_and_wait(running)
    await channels.close()
    metrics.close()
    assert not scheduler.faults
    assert all(scheduler.committed[fault] for fault in AWAY_FAULTS)
