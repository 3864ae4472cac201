"""The worker's session against a scheduler that does what each test says."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import pytest
from grpc import aio

from shared.aio.backoff import Backoff
from shared.aio.scope import spawn
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
from tests.support.breaking_group import BreakingGroup

_Context: TypeAlias = "aio.ServicerContext[scheduler_pb2.SessionUp, scheduler_pb2.SessionDown]"
Down = scheduler_pb2.SessionDown


class Handler:
    """A table that only counts commands."""

    def __init__(self) -> None:
        self.commands: list[tuple[int, int]] = []

    def handle_command(self, command: scheduler_pb2.Command, epoch: Epoch) -> None:
        """Number and epoch."""
        self.commands.append((command.number, epoch))

    def inventory(self) -> scheduler_pb2.Inventory:
        """One entry."""
        return scheduler_pb2.Inventory(entries=[scheduler_pb2.InventoryEntry(sequence_state="running")])

    def heartbeat(self) -> scheduler_pb2.Heartbeat:
        """One free block."""
        return scheduler_pb2.Heartbeat(blocks={"free": 1})


class Scripted(scheduler_pb2_grpc.SchedulerServicer):
    """Sends the messages of `scripts` down, one list a session, then a welcome to each unless silent; then listens.

    An acknowledgement waits for the first event of its session.
    """

    def __init__(self) -> None:
        self.host = "127.0.0.1"
        """By which it is found."""
        self.scripts: list[list[Down]] = []
        self.is_silent = False
        self.num_dials = 0
        self.sessions: list[list[scheduler_pb2.SessionUp]] = []

    async def Session(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, _request_iterator: object, context: _Context
    ) -> None:
        """One session."""
        heard: list[scheduler_pb2.SessionUp] = []
        script = self.scripts.pop(0) if self.scripts else [] if self.is_silent else [welcome()]
        self.sessions.append(heard)
        for down in script:
            while down.HasField("ack") and not any(up.HasField("event") for up in heard):
                if not await self._hear(heard, context):
                    return
            await context.write(down)
        while await self._hear(heard, context):
            pass

    async def _hear(self, heard: list[scheduler_pb2.SessionUp], context: _Context) -> bool:
        """One message more; False at the end of the stream."""
        up = await context.read()
        if up is aio.EOF:
            return False
        heard.append(up)
        return True

    async def until(self, is_met: Callable[[], bool]) -> None:
        """Looks now and then: what the worker has read changes without a message to us."""
        async with asyncio.timeout(30):
            while not is_met():
                await asyncio.sleep(0.005)

    def heard(self, session: int) -> list[scheduler_pb2.SessionUp]:
        """So far; nothing before it has begun."""
        return self.sessions[session] if session < len(self.sessions) else []

    def kinds(self, session: int) -> list[str]:
        """What was heard in it, in order."""
        return [up.WhichOneof("message") or "" for up in self.heard(session)]

    def numbers(self, session: int) -> list[int]:
        """Of the events heard in it, in order."""
        return [up.event.number for up in self.heard(session) if up.HasField("event")]


def welcome(epoch: int = 4) -> Down:
    """The first message down."""
    return Down(scheduler_epoch=epoch, welcome=scheduler_pb2.Welcome())


def command(number: int, epoch: int = 4) -> Down:
    """An Abort."""
    return Down(scheduler_epoch=epoch, command=scheduler_pb2.Command(number=number, abort=scheduler_pb2.Abort()))


def ack(upto: int) -> Down:
    """Events up to here."""
    return Down(scheduler_epoch=4, ack=scheduler_pb2.EventAck(upto=upto))


def event() -> scheduler_pb2.WorkerEvent:
    """Any."""
    return scheduler_pb2.WorkerEvent(released=scheduler_pb2.Released())


class Bench:
    """A session that runs against a scripted scheduler."""

    def __init__(self, scheduler: Scripted, session: WorkerSession, handler: Handler, metrics: Metrics) -> None:
        self.scheduler = scheduler
        self.session = session
        self.handler = handler
        self.metrics = metrics


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]
    """A welcome may take as long as anything else here: no session ends for its sake."""
    monkeypatch.setattr(worker_session, "WELCOME_TIMEOUT_S", 30.0)


@asynccontextmanager
async def bench(
    *scripts: list[Down], num_events: int = 0, unknown_addresses: int = 0, is_silent: bool = False
) -> AsyncGenerator[Bench]:
    """`num_events` are posted before the first dial; so many look-ups find no scheduler first."""
    scheduler = Scripted()  # pyright: ignore[reportAbstractUsage] - workers call Session alone
    scheduler.scripts, scheduler.is_silent = list(scripts), is_silent
    handler, metrics, channels = Handler(), Metrics("decode", "decode-0"), ChannelPool("")
    unknown = unknown_addresses

    def add(server: aio.Server) -> None:
        scheduler_pb2_grpc.add_SchedulerServicer_to_server(scheduler, server)

    async with serve(add, host="127.0.0.1", port=0, token="", services=()) as server, asyncio.TaskGroup() as group:

        async def locate() -> str:
            nonlocal unknown
            scheduler.num_dials += 1
            if unknown:
                unknown -= 1
                raise ServingError(ErrorCode.STATE_UNAVAILABLE, "no scheduler is known")
            return server.address.replace("127.0.0.1", scheduler.host)

        session = WorkerSession(
            identity=WorkerIdentity(
                role=Role.DECODE,
                worker_id=WorkerId("decode-0"),
                incarnation=Incarnation(2**64 - 1),
                address="host:1",
                admin_url="http://host:2",
                pid=42,
                layout=common_pb2.KvLayout(block_size=16),
                num_blocks=10,
                max_sequences=3,
            ),
            handler=handler,
            locate=locate,
            channel_for=channels.get,
            backoff=Backoff(initial_s=0.01, max_s=0.01, random=lambda: 0.0),
            clock=RealClock(),
            metrics=metrics,
            log=get_logger("test"),
        )
        for _ in range(num_events):
            session.post(event())
        task = spawn(group, session.run(), name="session")
        yield Bench(scheduler, session, handler, metrics)
        task.cancel()
    await channels.close()
    metrics.close()


async def test_hello_events_inventory_heartbeat_in_that_order() -> None:
    """What the scheduler must know first comes first; the hello says who we are."""
    async with bench(num_events=2) as b:
        # The worker writes without waiting for the welcome.
        await b.scheduler.until(lambda: len(b.scheduler.heard(0)) >= 5 and b.session.is_established)

        assert b.scheduler.kinds(0)[:5] == ["hello", "event", "event", "inventory", "heartbeat"]
        hello = b.scheduler.heard(0)[0].hello
        assert (hello.worker_id, hello.role, hello.pid, hello.num_blocks) == (
            "decode-0",
            common_pb2.ROLE_DECODE,
            42,
            10,
        )
        assert hello.incarnation == 2**64 - 1
        assert b.scheduler.numbers(0) == [1, 2]


async def test_acknowledged_events_are_forgotten_and_the_others_told_again() -> None:
    """Numbers go on over sessions; an acknowledgement beyond what was posted is no reason to forget the next event."""
    async with bench([welcome(), ack(1), welcome(3)], [welcome(), ack(99)], num_events=2) as b:
        await b.scheduler.until(lambda: len(b.scheduler.sessions) == 2 and len(b.scheduler.heard(1)) >= 3)
        assert b.scheduler.numbers(1) == [2]
        await b.scheduler.until(lambda: b.session.num_unacknowledged == 0)  # the acknowledgement is heard first
        b.session.post(event())
        await b.scheduler.until(lambda: b.scheduler.numbers(1) == [2, 3])


async def test_commands_are_handed_on_and_seen_in_the_next_heartbeat() -> None:
    """With the epoch that they came under; a heartbeat is as of the last command applied."""
    async with bench([welcome(), command(1), command(2, epoch=9)]) as b:
        b.session.heartbeat_soon()
        await b.scheduler.until(lambda: any(up.heartbeat.commands_seen == 2 for up in b.scheduler.heard(0)))

        assert b.handler.commands == [(1, 4), (2, 9)]
        assert b.session.highest_epoch == 9


@pytest.mark.parametrize(
    "script",
    [
        [welcome(), command(1, epoch=9), command(2, epoch=8)],
        [command(1)],
    ],
    ids=["older epoch", "no welcome first"],
)
async def test_a_scheduler_that_breaks_the_rules_is_left(script: list[Down]) -> None:
    """The session ends and the next is dialled; nothing that came after the breach was applied."""
    async with bench(script, [welcome(20)]) as b:
        await b.scheduler.until(lambda: len(b.scheduler.sessions) == 2 and len(b.scheduler.heard(1)) >= 3)

        assert b.handler.commands == ([(1, 9)] if len(script) == 3 else [])
        assert b.scheduler.heard(1)[0].hello.scheduler_epoch == max(down.scheduler_epoch for down in script)


async def test_a_scheduler_that_says_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session ends and the next is dialled, with no epoch learnt, until one is greeted."""
    monkeypatch.setattr(worker_session, "WELCOME_TIMEOUT_S", 0.1)
    async with bench(is_silent=True) as b:
        await b.scheduler.until(lambda: b.scheduler.num_dials >= 2)
        # Who was dialled before has the short limit, however slow this machine: only later ones are greeted in time.
        b.scheduler.is_silent = False
        monkeypatch.setattr(worker_session, "WELCOME_TIMEOUT_S", 30.0)
        await b.scheduler.until(lambda: b.session.is_established and any(b.scheduler.sessions))

        hellos = [up.hello for heard in b.scheduler.sessions for up in heard if up.HasField("hello")]
        assert {0} == {hello.scheduler_epoch for hello in hellos}
        assert b.handler.commands == []


async def test_one_that_never_acknowledges_gets_no_more_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events are bounded: a scheduler that commands without acknowledging is left before its command is applied."""
    monkeypatch.setattr(worker_session, "MAX_UNACKNOWLEDGED_EVENTS", 2)
    async with bench([welcome(), command(1)], num_events=2) as b:
        await b.scheduler.until(lambda: len(b.scheduler.sessions) == 2 and len(b.scheduler.heard(1)) >= 1)

        assert b.handler.commands == []
        assert b.session.num_unacknowledged == 2


async def test_heartbeats_come_at_once_when_asked_and_say_when_draining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Capacity that grew, or the wish to drain, does not wait for the next beat."""
    monkeypatch.setattr(worker_session, "HEARTBEAT_S", 3600.0)
    async with bench() as b:
        await b.scheduler.until(lambda: "heartbeat" in b.scheduler.kinds(0))
        b.session.drain()
        await b.scheduler.until(lambda: any(up.heartbeat.draining for up in b.scheduler.heard(0)))

        assert b.scheduler.heard(0)[-1].heartbeat.blocks["free"] == 1


async def test_a_scheduler_that_cannot_be_found_is_looked_for_again() -> None:
    """Redis away, or no lease yet: no reason to end."""
    async with bench(unknown_addresses=3) as b:
        await b.scheduler.until(lambda: bool(b.scheduler.sessions) and bool(b.scheduler.heard(0)))

        assert b.scheduler.kinds(0)[0] == "hello"


async def test_a_scheduler_that_was_replaced_and_lives_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut off from Redis alone, it keeps its sessions; whoever has the lease is the active one."""
    monkeypatch.setattr(worker_session, "LOOK_INTERVAL_S", 0.01)
    async with bench([welcome()], [welcome(5)]) as b:
        await b.scheduler.until(lambda: b.session.is_established)
        b.scheduler.host = "ipv4:127.0.0.1"  # another name of the same place, which needs no resolver
        await b.scheduler.until(lambda: bool(b.scheduler.heard(1)) and b.session.highest_epoch == 5)
        assert 4 == b.scheduler.heard(1)[0].hello.scheduler_epoch


async def test_a_session_that_is_ended_while_its_stream_breaks_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task group keeps a cancel to itself while it fails: nothing is dialled after it all the same."""
    breaking = BreakingGroup()

    async def hold_one(_: WorkerSession) -> None:
        await breaking.run()

    monkeypatch.setattr(WorkerSession, "_hold_one", hold_one)
    async with asyncio.timeout(30):
        async with bench():
            await breaking.is_breaking.wait()
            asyncio.get_running_loop().call_soon(
                breaking.may_end.set
            )  # right after the cancel at the end of this block
    assert 1 == breaking.num_tries
