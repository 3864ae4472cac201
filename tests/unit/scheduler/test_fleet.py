"""What the scheduler believes of a worker between two heartbeats."""

from scheduler.fleet import Fleet, Worker
from scheduler.messages import AbortJob, PrefillJob, ReserveJob, SessionId
from shared.domain.ids import Attempt, Incarnation, RequestId, RequestKey, TransferId, WorkerId
from shared.domain.request import Role
from shared.domain.worker import Capacity, KvTarget, WorkerFacts, WorkerRef
from tests.support.scheduler_peers import make_spec

KEY, OTHER = RequestKey(RequestId("r1"), Attempt(1)), RequestKey(RequestId("r2"), Attempt(1))
TARGET = KvTarget(
    worker_id=WorkerId("d"), address="a", incarnation=Incarnation(1), transfer_id=TransferId(1), transports=()
)


def connected(role: Role = Role.DECODE, *, max_sequences: int = 8) -> Worker:
    """A worker of 10 blocks of 16 tokens that has told its inventory."""
    facts = WorkerFacts(
        role=role,
        ref=WorkerRef(WorkerId("w"), Incarnation(1)),
        address="a",
        admin_url="",
        pid=1,
        layout=b"l",
        block_size=16,
        num_blocks=10,
        max_sequences=max_sequences,
        token_budget=64,
    )
    worker = Worker(facts=facts, heard_at=0.0)
    worker.open_session(SessionId(1), facts, 0.0)
    worker.has_told_inventory = True
    return worker


def test_free_blocks_are_as_told_less_what_was_commanded_later() -> None:
    """A heartbeat that has seen the command counts its blocks itself."""
    worker = connected()
    worker.capacity = Capacity(commands_seen=0, blocks={"free": 9})
    worker.command(KEY, ReserveJob(spec=make_spec(prompt=20, max_tokens=12)))
    assert 7 == worker.free_blocks
    worker.capacity = Capacity(commands_seen=1, blocks={"free": 3, "cached": 4, "active": 2})
    assert 7 == worker.free_blocks
    worker.book(OTHER, make_spec("r2", prompt=16, max_tokens=1), 0)
    assert 5 == worker.free_blocks
    worker.unbook(OTHER)
    assert 7 == worker.free_blocks


def test_before_the_first_heartbeat_our_own_books_count() -> None:
    """Nothing told yet: the pool less all that was booked."""
    worker = connected()
    worker.book(KEY, make_spec(prompt=20, max_tokens=12), 0)
    assert 8 == worker.free_blocks


def test_a_sequence_is_booked_with_a_block_to_go_on_into() -> None:
    """Prompt, what its gateway holds and a replay is worth it for, one block more; never beyond its longest answer."""
    worker = connected()
    for delivered, max_tokens, blocks in [(0, 100, 3), (12, 100, 5), (13, 100, 6), (0, 12, 2), (13, 20, 3)]:
        worker.book(KEY, make_spec(prompt=20, max_tokens=max_tokens), delivered)
        assert 10 - blocks == worker.free_blocks


def test_remaining_tokens_are_told_plus_later_prompts_and_never_above_our_books() -> None:
    """A prompt reported as computed does not remain, whatever the last heartbeat said."""
    worker = connected(Role.PREFILL)
    worker.capacity = Capacity(commands_seen=0, queued_prompt_tokens=0, blocks={"free": 10})
    worker.command(KEY, PrefillJob(spec=make_spec(prompt=20), target=TARGET))
    assert 20 == worker.remaining_tokens
    worker.capacity = Capacity(commands_seen=1, queued_prompt_tokens=20, blocks={"free": 8})
    assert 20 == worker.remaining_tokens
    worker.jobs[KEY].tokens_left = 0
    assert 0 == worker.remaining_tokens


def test_places_count_what_is_held_and_what_is_on_its_way() -> None:
    """Ended sequences take no place."""
    worker = connected(max_sequences=2)
    worker.capacity = Capacity(commands_seen=0, blocks={"free": 10}, sequences={"running": 1, "done": 5})
    assert worker.has_place
    worker.command(KEY, ReserveJob(spec=make_spec()))
    worker.command(OTHER, ReserveJob(spec=make_spec("r2")))
    assert not worker.has_place
    worker.released(KEY)
    worker.capacity = Capacity(commands_seen=2, blocks={"free": 8}, sequences={"running": 1})
    assert worker.has_place


def test_unanswered_commands_are_numbered_anew_in_a_new_session() -> None:
    """In their order; an Abort takes the place of what it ends; nothing goes out before the inventory."""
    worker = connected()
    worker.command(KEY, ReserveJob(spec=make_spec()))
    worker.command(OTHER, ReserveJob(spec=make_spec("r2")))
    worker.command(KEY, AbortJob())
    worker.open_session(SessionId(2), worker.facts, 1.0)
    assert None is worker.command(KEY, AbortJob())
    worker.has_told_inventory = True

    again = worker.commands_again()

    assert [(1, KEY, AbortJob), (2, OTHER, ReserveJob)] == [(each.number, each.key, type(each.body)) for each in again]


def test_events_are_acknowledged_up_to_the_first_that_awaits_a_write() -> None:
    """And an older number is a duplicate."""
    worker = connected()
    assert [True, True, False, True] == [worker.take_event(number) for number in (4, 5, 5, 6)]
    worker.events_in_write.add(5)
    assert [4, None] == [worker.ack_due(), worker.ack_due()]
    worker.events_in_write.clear()
    assert 6 == worker.ack_due()


def test_a_fleet_knows_a_start_by_its_session_until_it_is_detached() -> None:
    """Input of an older session finds nobody; another incarnation is another start."""
    fleet, worker = Fleet(), connected()
    fleet.add(worker)
    fleet.attach(worker, SessionId(1))
    assert worker is fleet.by_session(SessionId(1))
    assert None is fleet.by_ref(WorkerRef(WorkerId("w"), Incarnation(2)))
    assert SessionId(1) == fleet.detach(worker)
    assert None is fleet.by_session(SessionId(1))
    fleet.remove(worker)
    assert [] == list(fleet)
