"""The prefill worker's table alone: blocks in turn, progress, ends, and who is told what."""

from collections.abc import Iterator

import pytest

from prefill_worker.job import PrefillJob
from prefill_worker.service import PrefillService
from shared.codec.request import key_to_wire, spec_to_wire
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Epoch, RequestId, RequestKey, TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.engine.executor import SampledToken, SequenceFault
from shared.engine.prefill_runner import AddPrompt, ChunkDone, DropPrompt, PrefillCommand, PrefillStep
from shared.kv.block_pool import BlockPool
from shared.kv.frame_plan import LayersDone
from shared.kv.layout import KvLayout
from shared.obs.logs import get_logger
from shared.obs.metrics import Metrics
from shared.wire import scheduler_pb2
from tests.support.hand_clock import HandClock
from tests.support.worker_fakes import FakeEngine, FakeEvents

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_size=4, numerics=b"n")
FIRST = SampledToken(token_id=TokenId(77))


class FakeSenders:
    """Remembers the jobs in the order of their start."""

    def __init__(self) -> None:
        self.jobs: list[PrefillJob] = []

    def start(self, job: PrefillJob) -> None:
        """Remember it."""
        self.jobs.append(job)


class Table:
    """The service with everything around it replaced."""

    def __init__(self, metrics: Metrics) -> None:
        self.clock = HandClock()
        self.pool = BlockPool(4)
        self.engine: FakeEngine[PrefillCommand] = FakeEngine()
        self.events = FakeEvents()
        self.senders = FakeSenders()
        self.service = PrefillService(
            layout=LAYOUT,
            pool=self.pool,
            max_sequences=3,
            clock=self.clock,
            metrics=metrics,
            log=get_logger("test"),
        )
        self.service.connect(self.engine, self.events, self.senders)

    def command(self, name: str, **command: object) -> RequestKey:
        """Hand a command to the table."""
        key = RequestKey(RequestId(name), Attempt(1))
        message = scheduler_pb2.Command(key=key_to_wire(key), **command)  # pyright: ignore[reportArgumentType]
        self.service.handle_command(message, Epoch(5))
        return key

    def prefill(
        self,
        name: str = "r",
        *,
        num_prompt_tokens: int = 10,
        salt: int = 0,
        num_delivered: int = 0,
        distrust_cache: bool = False,
        timeout_ms: int = 0,
    ) -> RequestKey:
        """A prompt; ten tokens take three of the four blocks. All prompts of one salt begin alike."""
        spec = RequestSpec(
            request_id=RequestId(name),
            prompt_ids=tuple(TokenId(token) for token in range(num_prompt_tokens)),
            max_tokens=5,
            sampling=SamplingParams(seed=1),
            kv_salt=salt,
        )
        prefill = scheduler_pb2.Prefill(
            spec=spec_to_wire(spec), num_delivered=num_delivered, distrust_cache=distrust_cache, timeout_ms=timeout_ms
        )
        return self.command(name, prefill=prefill)

    def compute(self, name: str, *, num_prompt_tokens: int = 10, salt: int = 0) -> tuple[PrefillJob, int]:
        """A prompt from its command to its last acknowledgement; the job, and where the engine was told to start."""
        key = self.prefill(name, num_prompt_tokens=num_prompt_tokens, salt=salt)
        job, command = self.senders.jobs[-1], self.engine.commands[-1]
        assert isinstance(command, AddPrompt)
        self.step(chunk(key, command.start, num_prompt_tokens, is_last=True))
        self.service.sent(job)
        return job, command.start

    def abort(self, name: str = "r") -> None:
        """Abort it."""
        self.command(name, abort=scheduler_pb2.Abort())

    def step(
        self,
        *chunks: ChunkDone,
        faults: dict[RequestKey, SequenceFault] | None = None,
        dropped: tuple[RequestKey, ...] = (),
    ) -> None:
        """The engine's report; token 1 is 77."""
        self.service.on_step(
            PrefillStep(
                chunks=chunks,
                first_tokens={chunk.key: FIRST for chunk in chunks if chunk.is_last},
                faults=faults or {},
                dropped=dropped,
                num_sequences=len(chunks),
                num_tokens=sum(chunk.end - chunk.start for chunk in chunks),
            )
        )


def chunk(key: RequestKey, start: int, end: int, *, is_last: bool = False) -> ChunkDone:
    """Positions [start, end) are there."""
    return ChunkDone(key=key, start=start, end=end, is_last=is_last)


@pytest.fixture
def table() -> Iterator[Table]:
    """A fresh table."""
    metrics = Metrics("prefill", "prefill-0")
    yield Table(metrics)
    metrics.close()


def test_layers_of_the_running_chunk_are_told_to_the_sender(table: Table) -> None:
    """Those of an attempt that is not here any more are nobody's."""
    key = table.prefill()
    (job,) = table.senders.jobs
    running = LayersDone(token_end=6, num_layers=1, is_last=False)
    table.service.on_layers({key: running, RequestKey(RequestId("gone"), Attempt(1)): running})

    assert (job.running, job.progressed.is_set(), job.computed_upto) == (running, True, 0)


def test_a_prompt_is_computed_sent_and_gone(table: Table) -> None:
    """PrefillDone at the last chunk; the blocks stay until decode has acknowledged everything."""
    key = table.prefill()
    (job,) = table.senders.jobs
    assert isinstance(table.engine.commands[0], AddPrompt)
    table.step(chunk(key, 0, 6))
    assert job.progressed.is_set()
    assert job.computed_upto == 6
    assert table.service.heartbeat().queued_prompt_tokens == 4
    table.step(chunk(key, 6, 10, is_last=True))
    assert (job.computed_upto, job.first_token, job.computed.is_set()) == (10, FIRST, True)
    assert table.events.names() == ["prefill_done"]
    assert table.pool.num_available == 1
    table.service.sent(job)

    assert table.pool.num_available == 4
    assert table.service.is_idle
    assert table.events.names() == ["prefill_done"]
    table.abort()
    released = table.events.posted[1].released
    assert (released.blocks_freed, released.computed_tokens) == (0, 10)


def test_prompts_wait_for_blocks_in_their_order(table: Table) -> None:
    """A small one does not pass a large one that waits; each is given to its sender at once, to hold its reservation."""
    first, second, third = (table.prefill(name, salt=salt) for salt, name in enumerate(("first", "second", "third")))
    assert [job.key for job in table.senders.jobs] == [first, second, third]
    assert [command.key for command in table.engine.commands] == [first]
    table.service.dropped(table.senders.jobs[1])
    table.step(chunk(first, 0, 10, is_last=True))
    table.service.sent(table.senders.jobs[0])

    assert [command.key for command in table.engine.commands] == [first, third]
    assert table.service.heartbeat().queued_prompt_tokens == 10


def test_an_abort_waits_for_the_engine_and_for_reads(table: Table) -> None:
    """Released comes once, when neither a step nor the copy thread can touch the blocks any more."""
    key = table.prefill()
    (job,) = table.senders.jobs
    table.step(chunk(key, 0, 6))
    table.service.read_began(job)
    table.abort()
    table.abort()
    assert job.stopped.is_set()
    assert table.engine.commands[1:] == [DropPrompt(key=key)]
    table.step(dropped=(key,))
    assert table.events.names() == []
    assert table.pool.num_available == 1
    table.service.read_returned(job)

    assert table.events.names() == ["released"]
    released = table.events.posted[0].released
    assert (released.blocks_freed, released.computed_tokens) == (3, 6)


def test_a_prompt_that_ends_while_it_is_dropped_is_no_success(table: Table) -> None:
    """The last chunk was under way when the abort came: no PrefillDone, and the blocks come back with it."""
    key = table.prefill()
    table.abort()
    table.step(chunk(key, 0, 10, is_last=True))
    table.step(dropped=(key,))

    assert table.events.names() == ["released"]
    assert table.events.posted[0].released.blocks_freed == 3


@pytest.mark.parametrize("is_told", [True, False])
def test_the_end_of_a_transfer_is_told_unless_decode_has_told_it(table: Table, is_told: bool) -> None:
    """A failure to send is ours to report; a job that decode has ended goes quietly."""
    key = table.prefill()
    (job,) = table.senders.jobs
    table.step(chunk(key, 0, 10, is_last=True))
    if is_told:
        table.service.send_failed(job, ServingError(ErrorCode.KV_TRANSFER_FAILED, "unreachable"))
        table.service.send_failed(job, ServingError(ErrorCode.KV_TRANSFER_FAILED, "unreachable"))
    else:
        table.service.dropped(job)

    assert table.events.names() == ["prefill_done", *(["attempt_failed"] if is_told else [])]
    assert table.pool.num_available == 4


def test_a_fault_fails_its_prompt_alone(table: Table) -> None:
    """The other one of the step goes on."""
    bad = table.prefill("bad", num_prompt_tokens=4)
    good = table.prefill("good", num_prompt_tokens=4)
    table.step(chunk(good, 0, 4, is_last=True), faults={bad: SequenceFault(ErrorCode.INTERNAL, "internal error")})

    assert [(event.key.request_id, event.WhichOneof("event")) for event in table.events.posted] == [
        ("good", "prefill_done"),
        ("bad", "attempt_failed"),
    ]
    assert table.pool.num_available == 3


def test_what_cannot_be_taken_is_refused_with_a_reason(table: Table) -> None:
    """Larger than the pool, one too many, being stopped, meaningless; each leaves nothing but a tombstone."""
    table.prefill("huge", num_prompt_tokens=17)
    for name in ("a", "b", "c", "d"):
        table.prefill(name)
    table.service.is_draining = True
    table.prefill("late")
    table.command("empty", prefill=scheduler_pb2.Prefill())

    told = {event.key.request_id: event.attempt_failed.error.code for event in table.events.posted}
    assert told == {"huge": "NEVER_FITS", "d": "NO_CAPACITY", "late": "DRAINING", "empty": "INVALID_REQUEST"}
    assert len(table.senders.jobs) == 3


def test_repeats_and_late_commands_change_nothing(table: Table) -> None:
    """Asked twice, a job runs once; after its abort it does not come back; another role's command is dropped."""
    table.prefill()
    table.prefill()
    assert len(table.senders.jobs) == 1
    table.abort("unknown")
    table.prefill("unknown")
    table.command("r", reserve=scheduler_pb2.Reserve())

    assert table.events.names() == ["released"]
    assert len(table.senders.jobs) == 1


def test_a_dead_engine_fails_what_it_had_not_computed(table: Table) -> None:
    """What is computed is still brought to decode; what was being dropped is answered; nothing new is taken."""
    computed, running, leaving = (
        table.prefill(name, num_prompt_tokens=4) for name in ("computed", "running", "leaving")
    )
    table.step(chunk(computed, 0, 4, is_last=True))
    table.abort("leaving")
    table.events.posted.clear()
    table.service.on_engine_dead()
    table.prefill("late")

    assert [(event.key.request_id, event.WhichOneof("event")) for event in table.events.posted] == [
        (running.request_id, "attempt_failed"),
        (leaving.request_id, "released"),
        ("late", "attempt_failed"),
    ]
    assert not table.senders.jobs[0].stopped.is_set()
    assert table.service.heartbeat().draining


def test_heartbeat_and_inventory_tell_what_is_held(table: Table) -> None:
    """Running prompts, the ends of the last 60 s, and every block state with a count."""
    table.prefill("held", num_prompt_tokens=4)
    table.abort("ended")
    heartbeat = table.service.heartbeat()
    inventory = {entry.key.request_id: entry.sequence_state for entry in table.service.inventory().entries}

    assert dict(heartbeat.blocks) == {"free": 3, "reserved": 0, "active": 1, "cached": 0, "quarantined": 0}
    assert dict(heartbeat.sequences) == {"waiting_kv": 0, "running": 1, "parked": 0, "preempted": 0, "done": 0}
    assert inventory == {"held": "running", "ended": "done"}


def test_a_prompt_is_computed_behind_what_is_cached(table: Table) -> None:
    """10 tokens in blocks of 4: nothing, then two blocks; the blocks are the same ones, and may leave at once."""
    first, start = table.compute("first")
    assert (start, first.cached_tokens, first.computed_tokens) == (0, 0, 10)
    assert dict(table.service.heartbeat().blocks) == {
        "free": 2, "reserved": 0, "active": 0, "cached": 2, "quarantined": 0
    }  # fmt: skip
    key = table.prefill("second")
    second, command = table.senders.jobs[-1], table.engine.commands[-1]
    assert isinstance(command, AddPrompt)
    assert (command.start, second.cached_tokens, second.computed_upto) == (8, 8, 8)
    assert second.progressed.is_set()
    assert command.block_table.block_ids[:2] == (0, 1)
    assert table.service.heartbeat().queued_prompt_tokens == 2
    table.step(chunk(key, 8, 10, is_last=True))
    table.service.sent(second)
    table.abort("second")

    done = [event.prefill_done.computed_tokens for event in table.events.posted if event.HasField("prefill_done")]
    assert done == [10, 2]
    assert table.events.posted[-1].released.computed_tokens == 2
    assert table.service.heartbeat().blocks["cached"] == 2


@pytest.mark.parametrize(("num_prompt_tokens", "expected"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_the_last_token_is_always_computed(table: Table, num_prompt_tokens: int, expected: int) -> None:
    """Of a prompt that is cached whole, at least its last token, and with it its last block."""
    table.compute("first", num_prompt_tokens=16)
    assert table.compute("second", num_prompt_tokens=num_prompt_tokens)[1] == expected


def test_salts_do_not_mix(table: Table) -> None:
    """First use under each salt: nothing is cached; second: it is (PFX-01)."""
    starts = [
        table.compute(f"r{number}", num_prompt_tokens=5, salt=salt)[1] for number, salt in enumerate((1, 2, 0) * 2)
    ]
    assert starts == [0, 0, 0, 4, 4, 4]


def test_blocks_can_be_found_while_their_prompt_goes_on(table: Table) -> None:
    """And they stay for the second prompt when the first one is aborted."""
    first = table.prefill("first")
    table.step(chunk(first, 0, 6))
    table.prefill("second", num_prompt_tokens=6)
    command = table.engine.commands[-1]
    assert isinstance(command, AddPrompt)
    assert (command.start, command.block_table.block_ids[0]) == (4, 0)
    table.abort("first")
    table.step(dropped=(first,))

    assert dict(table.service.heartbeat().blocks) == {
        "free": 2, "reserved": 0, "active": 2, "cached": 0, "quarantined": 0
    }  # fmt: skip
    table.pool.check_integrity()


def test_cached_blocks_give_way_to_a_prompt_that_needs_them(table: Table) -> None:
    """One that waits for blocks gives those that it found back, and looks again when it is its turn."""
    table.compute("old", num_prompt_tokens=8)
    running = table.prefill("running", num_prompt_tokens=12, salt=9)
    table.prefill("waiting", num_prompt_tokens=9)
    assert [type(command) for command in table.engine.commands] == [AddPrompt, AddPrompt]
    table.pool.check_integrity()
    table.step(chunk(running, 0, 12, is_last=True))
    table.service.sent(table.senders.jobs[1])

    command = table.engine.commands[-1]
    assert isinstance(command, AddPrompt)
    assert (command.key.request_id, command.start) == ("waiting", 4)
    table.pool.check_integrity()


def test_a_continued_answer_wants_no_token(table: Table) -> None:
    """Its prompt is computed behind what is cached like any other."""
    table.compute("first")
    table.prefill("again", num_delivered=3)
    command = table.engine.commands[-1]
    assert isinstance(command, AddPrompt)
    assert (command.start, command.wants_token) == (8, False)


def test_a_cached_beginning_that_turned_out_wrong_is_computed_anew(table: Table) -> None:
    """The retry of an attempt whose KV was wrong uses none of it, and neither does anybody after."""
    assert 0 == table.compute("first")[1]
    assert 8 == table.compute("second")[1]
    key = table.prefill("third", distrust_cache=True)
    command = table.engine.commands[-1]
    assert isinstance(command, AddPrompt)
    assert 0 == command.start
    wrong = table.senders.jobs[0]
    assert not set(table.senders.jobs[-1].blocks) & set(wrong.blocks)
    table.step(chunk(key, 0, 10, is_last=True))
    table.service.sent(table.senders.jobs[-1])

    again, start = table.compute("fourth")

    assert 8 == start
    assert 2 == again.computed_tokens
    table.pool.check_integrity()


def test_a_prompt_whose_time_is_over_is_dropped(table: Table) -> None:
    """Waiting or being computed; its blocks come back when the engine has let go."""
    late = table.prefill("late", timeout_ms=2_000)
    other = table.prefill("other", num_prompt_tokens=3, salt=1)
    table.clock.advance(1.9)
    table.service.sweep()
    assert [] == failures(table)
    table.clock.advance(0.1)
    table.service.sweep()
    assert [("late", "DEADLINE_EXCEEDED")] == failures(table)
    assert table.engine.commands[-1] == DropPrompt(key=late)
    table.step(dropped=(late,))
    assert [other] == [job.key for job in table.senders.jobs if not job.stopped.is_set()]


def test_a_drain_hands_over_what_is_not_with_decode(table: Table) -> None:
    """With a code that sends it to another worker."""
    key = table.prefill("r")
    table.service.hand_over()
    table.step(dropped=(key,))
    assert [("r", "DRAINING")] == failures(table)
    assert table.service.is_idle


def failures(table: Table) -> list[tuple[str, str]]:
    """Request and code of each attempt that failed."""
    return [
        (event.key.request_id, event.attempt_failed.error.code)
        for event in table.events.posted
        if event.WhichOneof("event") == "attempt_failed"
    ]
