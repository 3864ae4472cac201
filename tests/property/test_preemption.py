"""Whatever pool, arrivals and readers: who is preempted comes back, and every answer is the one that it has alone.

The real table, pool, prefix index and runner of a decode worker, without threads, between a small model of scheduler
and prefill and readers that take what they like. Hypothesis chooses pool, requests and the order of events; at the end
everyone gets what he waits for, within a bound on the number of steps.
"""

import json
import zlib
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

import hypothesis
from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.growth import KEPT_TOKENS
from decode_worker.sequence import HeldSequence
from decode_worker.service import DecodeService
from shared.codec.request import key_to_wire, spec_to_wire
from shared.domain.ids import Attempt, BlockId, Epoch, Incarnation, RequestId, RequestKey, TokenId, WorkerId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.engine.decode_runner import DecodeCommand, DecodeRunner, DecodeStep
from shared.engine.executor import PrefillChunk, SampledToken
from shared.engine.kv_digest import digest_layout
from shared.engine.scripted import ScriptedExecutor
from shared.kv.block_pool import BlockPool
from shared.kv.block_table import BlockTable
from shared.kv.frame_plan import plan_frames
from shared.kv.frames import FrameHeader, WriteBlocks
from shared.kv.memory import KvMemory
from shared.obs.logs import get_logger
from shared.obs.metrics import Metrics
from shared.text.script import Script
from shared.wire import scheduler_pb2
from tests.support.hand_clock import HandClock

BLOCK_SIZE = 4
LAYOUT = digest_layout(BLOCK_SIZE)
SENDER = Incarnation(3)
RECEIVER = Incarnation(9)
OUTBOX_TOKENS = 6


class _Engine:
    """The step loop without its thread: steps when told, and its reports come when told."""

    def __init__(self, runner: DecodeRunner) -> None:
        self.runner = runner
        self.commands: deque[DecodeCommand] = deque()
        self.reports: deque[DecodeStep] = deque()
        self.is_busy = False

    def submit(self, command: DecodeCommand) -> None:
        """Takes effect at the next border."""
        self.commands.append(command)

    def last_step_age(self) -> float:
        """Nobody asks."""
        return 0.0

    def step(self) -> None:
        """One border and one step."""
        while self.commands:
            self.runner.apply(self.commands.popleft())
        self.reports += [report for report in (self.runner.acknowledge(), self.runner.step()) if report is not None]


@dataclass(eq=False)
class _Request:
    """What scheduler and reader know of one request; the reader's stream reads `row`."""

    spec: RequestSpec
    attempt: int = 0
    is_placed: bool = False
    is_over: bool = False
    is_cancelled: bool = False
    tokens: list[int] = field(default_factory=list[int])
    num_preempted: int = 0
    num_delivered: int = 0
    """Of these, what it had when the attempt was placed."""
    was_placed_when_all_read: bool = False
    is_kept: bool = False
    """A replay that has joined, and whose reader never stands still."""

    @property
    def key(self) -> RequestKey:
        return RequestKey(self.spec.request_id, Attempt(self.attempt))

    def touch(self, sequence: HeldSequence) -> None:
        """As a stream does: everything unsent, at once."""
        if sequence.reader is self:
            self.flush(sequence)

    def flush(self, sequence: HeldSequence) -> None:
        """The same, for the last time."""
        new = sequence.outbox.read(max(sequence.next_unsent, sequence.outbox.acked_upto + 1))
        sequence.next_unsent += len(new)
        self.tokens += (token.token_id for token in new)


class _World:
    """Every method is one event."""

    def __init__(self, num_blocks: int, specs: list[RequestSpec], metrics: Metrics) -> None:
        self.memory = KvMemory(LAYOUT, num_blocks)
        self.pool = BlockPool(num_blocks)
        self.clock = HandClock()
        executor = ScriptedExecutor(self.memory, chunk_tokens=16, clock=self.clock)
        self.engine = _Engine(DecodeRunner(executor))
        self.events: deque[scheduler_pb2.WorkerEvent] = deque()
        self.service = DecodeService(
            worker_id=WorkerId("decode-0"),
            incarnation=RECEIVER,
            layout=LAYOUT,
            eos_ids=executor.eos_ids,
            pool=self.pool,
            max_sequences=16,
            outbox_tokens=OUTBOX_TOKENS,
            outbox_bytes=1024,
            shares_answers=True,
            clock=self.clock,
            metrics=metrics,
            log=get_logger("test"),
        )
        self.service.connect(self.engine, self, address="host:1")
        self.requests = {spec.request_id: _Request(spec) for spec in specs}
        self.arrived: list[_Request] = []
        self.all_read = False  # nobody is parked: the oldest never leaves

    def post(self, event: scheduler_pb2.WorkerEvent) -> None:
        """To the scheduler, which hears it later."""
        self.events.append(event)

    def heartbeat_soon(self) -> None:
        """The scheduler of this model asks each time."""

    def arrive(self) -> None:
        """The next request, in the order of ids."""
        waiting = [request for request in self.requests.values() if request not in self.arrived]
        if waiting:
            self.arrived.append(waiting[0])

    def place(self) -> None:
        """Oldest first, and none past one that is refused."""
        for request in sorted(self.arrived, key=lambda each: each.spec.request_id):
            if request.is_placed or request.is_over:
                continue
            request.attempt += 1
            request.is_kept = False
            request.num_delivered = len(request.tokens)
            request.was_placed_when_all_read = self.all_read
            reserve = scheduler_pb2.Reserve(spec=spec_to_wire(request.spec), delivered_ids=request.tokens)
            self._command(request, reserve=reserve)
            request.is_placed = True
            self.hear()
            if not request.is_placed:
                return

    def hear(self) -> None:
        """What the worker has told."""
        while self.events:
            told = self.events.popleft()
            request = self.requests[RequestId(told.key.request_id)]
            if told.key.attempt != request.attempt:
                continue
            match told.WhichOneof("event"):
                case "reserve_refused":
                    request.is_placed = False
                case "reserved":
                    row = self._row(request)
                    if row is not None:
                        assert row.tokens_held == told.reserved.target.tokens_held
                        self.service.attach(
                            row.key, ticket=row.attach_ticket, from_index=len(request.tokens) + 1, reader=request
                        )
                case "kv_committed":
                    request.is_kept = request.num_delivered > 0 and request.was_placed_when_all_read
                case "preempted":
                    assert not self.all_read or self._is_anyone_older(request)
                    if request.is_kept:
                        assert len(request.tokens) - request.num_delivered >= KEPT_TOKENS
                    request.num_preempted += 1
                    request.is_placed = False
                    self._command(request, abort=scheduler_pb2.Abort())
                case "sequence_done":
                    assert told.sequence_done.completion_tokens == len(request.tokens)
                    request.is_over = True
                    self._command(request, release=scheduler_pb2.Release())
                case "attempt_failed":
                    raise AssertionError(told.attempt_failed.error)
                case _:
                    pass

    def transfer(self, request: _Request) -> None:
        """Prefill computes the prompt and brings what decode lacks of it, then token 1."""
        row = self._row(request)
        if row is None or row.stage != "receiving":
            return
        num_tokens = request.spec.num_prompt_tokens
        memory = KvMemory(LAYOUT, LAYOUT.num_blocks_for(num_tokens))
        prefill = ScriptedExecutor(memory, chunk_tokens=1 << 20, clock=self.clock)
        table = BlockTable([BlockId(block) for block in range(memory.num_blocks)], BLOCK_SIZE)
        prefill.chunk_ends(request.key, request.spec)
        chunk = PrefillChunk(
            key=request.key,
            spec=request.spec,
            block_table=table,
            start=0,
            end=num_tokens,
            is_last=True,
            wants_token=not row.delivered,
        )
        (token,) = prefill.prefill([chunk])
        row.receiver.open(
            key=row.key, transfer_id=row.transfer_id, sender_incarnation=SENDER, receiver_incarnation=RECEIVER
        )
        for number, frame in enumerate(plan_frames(LAYOUT, row.tokens_held, num_tokens), start=1):
            payload = bytes(
                memory.read(
                    table.blocks_of(frame.token_start, frame.token_end),
                    layer_start=frame.layer_start,
                    layer_end=frame.layer_end,
                    num_tokens=frame.token_end - frame.token_start,
                )
            )
            header = FrameHeader(
                number=number,
                key=row.key,
                transfer_id=row.transfer_id,
                sender_incarnation=SENDER,
                range=frame,
                crc32=zlib.crc32(payload),
            )
            write = row.receiver.accept(header, payload_crc32=header.crc32, num_payload_bytes=len(payload))
            assert isinstance(write, WriteBlocks)
            self.memory.write(
                write.block_ids, layer_start=write.layer_start, layer_end=write.layer_end, payload=payload
            )
            row.receiver.copied(number)
            self.service.copy_returned(row, len(payload))
        if isinstance(token, SampledToken):
            self.service.take_first_token(row, token, 0)

    def deliver(self) -> None:
        """One report of the engine arrives."""
        if self.engine.reports:
            self.service.on_step(self.engine.reports.popleft())

    def ack(self, request: _Request) -> None:
        """The client has taken all."""
        self.service.ack(request.key, len(request.tokens), request)

    def cancel(self, request: _Request) -> None:
        """The client has gone."""
        if not request.is_over:
            request.is_over = request.is_cancelled = True
            if request.attempt:
                self._command(request, abort=scheduler_pb2.Abort())

    def pass_time(self, seconds: float) -> None:
        """And the sweep after it. Senders live."""
        for request in self.arrived:
            if (row := self._row(request)) is not None:
                self.service.sign(row)
        self.clock.advance(seconds)
        self.service.sweep()

    def _is_anyone_older(self, request: _Request) -> bool:
        return any(
            each.is_placed and not each.is_over and each.spec.request_id < request.spec.request_id
            for each in self.arrived
        )

    def _row(self, request: _Request) -> HeldSequence | None:
        found = self.service.find(request.key)
        return found if isinstance(found, HeldSequence) else None

    def _command(self, request: _Request, **command: object) -> None:
        message = scheduler_pb2.Command(key=key_to_wire(request.key), **command)  # pyright: ignore[reportArgumentType]
        self.service.handle_command(message, Epoch(1))


def _spec(number: int, pieces: list[str], repeat: int, eos: bool, max_tokens: int) -> RequestSpec:
    source = json.dumps({"pieces": pieces, "repeat": repeat, "eos": eos})
    return RequestSpec(
        request_id=RequestId(f"r{number:02}"),
        prompt_ids=tuple(TokenId(byte) for byte in source.encode()),
        max_tokens=max_tokens,
        sampling=SamplingParams(seed=0),
    )


def _alone(spec: RequestSpec) -> list[int]:
    script = Script.from_prompt(spec.prompt_ids)
    length = min(script.num_scripted_tokens + 1, spec.max_tokens) if script.eos else spec.max_tokens
    return list(islice(script.output_ids(), length))


REQUESTS = st.lists(
    st.tuples(
        st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=2),
        st.integers(1, 30),
        st.booleans(),
        st.integers(1, 90),
    ),
    min_size=2,
    max_size=8,
)
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "place", "transfer", "step", "step", "deliver", "deliver", "ack", "time", "cancel"]),
        st.integers(0, 7),
    ),
    max_size=80,
)


def _happen(world: _World, name: str, number: int) -> None:
    request = world.arrived[number % len(world.arrived)] if world.arrived else None
    match name:
        case "arrive":
            world.arrive()
        case "place":
            world.place()
        case "step":
            world.engine.step()
        case "deliver":
            world.deliver()
        case "time":
            world.pass_time(1.3 * number)
        case "transfer" if request is not None:
            world.transfer(request)
        case "ack" if request is not None:
            world.ack(request)
        case "cancel" if request is not None and number == 7:
            world.cancel(request)
        case _:
            pass
    world.hear()
    world.service.check_integrity()


@settings(max_examples=40, deadline=None)
@given(asked=REQUESTS, slack=st.integers(0, 30), events=EVENTS)
def test_whoever_is_preempted_ends_with_the_same_answer(
    asked: list[tuple[list[str], int, bool, int]], slack: int, events: list[tuple[str, int]]
) -> None:
    """In any pool that holds the largest alone: exact answers, no livelock, no replay in vain, nothing left held."""
    specs = [_spec(number, *each) for number, each in enumerate(asked)]
    num_blocks = max(LAYOUT.num_blocks_for(spec.max_total_tokens) for spec in specs) + slack
    metrics = Metrics("decode", "decode-0")
    world = _World(num_blocks, specs, metrics)
    for name, number in events:
        _happen(world, name, number)

    # Now everyone gets what he waits for. In each round the oldest gets a token, is replayed, or takes one of the few
    # steps of its hand-over; or it waits for one that came back, which does. Whoever was parked may have to wait for
    # the younger ones. A replay beside few others is three tokens a round.
    most = sum(3 * len(_alone(spec)) + 12 for spec in specs)
    for _ in specs:
        world.arrive()
    for request in world.arrived:
        world.ack(request)
    world.all_read = True
    num_rounds = 0
    while not all(request.is_over for request in world.requests.values()):
        num_rounds += 1
        assert num_rounds <= most
        world.place()
        for request in world.arrived:
            world.transfer(request)
        world.engine.step()
        while world.engine.reports:
            world.deliver()
        for request in world.arrived:
            world.ack(request)
        world.hear()
        world.service.check_integrity()
    world.engine.step()
    while world.engine.reports:
        world.deliver()

    metrics.close()
    for request in world.requests.values():
        expected = _alone(request.spec)
        assert request.tokens == (expected[: len(request.tokens)] if request.is_cancelled else expected)
    assert world.pool.num_available == num_blocks
    assert world.service.is_idle
    hypothesis.event(f"preemptions: {min(sum(request.num_preempted for request in world.requests.values()), 5)}")
