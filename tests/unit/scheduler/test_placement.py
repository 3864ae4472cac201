"""Who goes where, and who can never go anywhere."""

import pytest

from scheduler import placement
from scheduler.fleet import Worker
from scheduler.messages import SessionId
from scheduler.waiting import Waiter
from shared.domain.errors import ErrorCode
from shared.domain.ids import Attempt, Incarnation, RequestId, RequestKey, WorkerId
from shared.domain.request import Role
from shared.domain.worker import Capacity, WorkerFacts, WorkerRef, WorkerState
from tests.support.scheduler_peers import make_spec


def worker(
    role: Role, name: str, *, blocks: int = 10, free: int | None = None, queued: int = 0, layout: bytes = b"l"
) -> Worker:
    """A ready worker that has told its capacity."""
    facts = WorkerFacts(
        role=role,
        ref=WorkerRef(WorkerId(name), Incarnation(1)),
        address="a",
        admin_url="",
        pid=1,
        layout=layout,
        block_size=16,
        num_blocks=blocks,
        max_sequences=4,
        token_budget=32,
    )
    made = Worker(facts=facts, heard_at=0.0, state=WorkerState.READY, session=SessionId(1))
    made.capacity = Capacity(blocks={"free": blocks if free is None else free}, queued_prompt_tokens=queued)
    return made


def prefill(name: str = "p", *, blocks: int = 10, queued: int = 0, layout: bytes = b"l") -> Worker:
    """With so many tokens to compute, all of them in our own books."""
    made = worker(Role.PREFILL, name, blocks=blocks, queued=queued, layout=layout)
    if queued:
        made.book(RequestKey(RequestId("busy"), Attempt(1)), make_spec("busy", prompt=queued), 0)
        for job in made.jobs.values():
            job.sent_number, job.num_blocks = 0, 0
    return made


def decode(name: str = "d", *, blocks: int = 10, free: int | None = None, layout: bytes = b"l") -> Worker:
    """With so many free blocks."""
    return worker(Role.DECODE, name, blocks=blocks, free=free, layout=layout)


def waiter(prompt: int = 20, total: int = 30) -> Waiter:
    """A request of so many tokens."""
    return Waiter(request_id=RequestId("r"), num_prompt_tokens=prompt, max_total_tokens=total)


def chosen(
    asked: Waiter, prefills: list[Worker], decodes: list[Worker], kept: set[WorkerId] | None = None
) -> tuple[str, str] | None:
    """Names of the chosen pair."""
    pair = placement.choose(asked, prefills, decodes, kept or set(), 100.0)
    return None if pair is None else (pair.prefill.worker_id, pair.decode.worker_id)


def test_most_free_blocks_and_least_remaining_tokens_win() -> None:
    """Of those that have room."""
    prefills = [prefill("p0", queued=40), prefill("p1", queued=10)]
    decodes = [decode("d0", free=5), decode("d1", free=7), decode("d2", free=1)]

    assert ("p1", "d1") == chosen(waiter(), prefills, decodes)


@pytest.mark.parametrize(("queued", "prompt", "fits"), [(0, 500, True), (44, 20, True), (45, 20, False)])
def test_prefill_is_given_two_budgets_ahead(queued: int, prompt: int, fits: bool) -> None:
    """An idle one takes any prompt that its pool holds."""
    pair = chosen(waiter(prompt, prompt + 1), [prefill(blocks=40, queued=queued)], [decode(blocks=40)])

    assert fits == (pair is not None)


def test_layouts_of_a_pair_are_equal() -> None:
    """The freest decode worker is of no use to a prefill worker of another layout."""
    decodes = [decode("d0", free=9, layout=b"x"), decode("d1", free=3)]

    assert ("p", "d1") == chosen(waiter(), [prefill()], decodes)
    assert None is chosen(waiter(), [prefill(layout=b"y")], decodes)


def test_kept_and_unready_workers_get_nothing() -> None:
    """A kept one is for someone else; one without a session may be gone."""
    assert None is chosen(waiter(), [prefill()], [decode()], {WorkerId("d")})
    silent = decode()
    silent.session = None
    assert None is chosen(waiter(), [prefill()], [silent])


def test_a_refusal_is_remembered_until_more_blocks_are_told_later() -> None:
    """Or for a few seconds, in case it had another cause."""
    asked, refuser = waiter(), decode(free=8)
    refuser.capacity_at = 98.0
    asked.refusals[refuser.worker_id] = (4, 99.0)
    assert None is chosen(asked, [prefill()], [refuser])
    refuser.capacity_at = 99.5
    assert ("p", "d") == chosen(asked, [prefill()], [refuser])
    asked.refusals[refuser.worker_id] = (8, 99.0)
    assert None is chosen(asked, [prefill()], [refuser])
    refuser.capacity = Capacity(blocks={"free": 7, "cached": 2})
    assert ("p", "d") == chosen(asked, [prefill()], [refuser])
    refuser.capacity = Capacity(blocks={"free": 8})
    asked.refusals[refuser.worker_id] = (8, 95.0)
    assert ("p", "d") == chosen(asked, [prefill()], [refuser])


def test_a_worker_that_failed_is_left_out_while_another_could_serve() -> None:
    """Even if that one has no room now; where there is no other it is tried again."""
    asked, failed = waiter(20, 60), decode("d0", free=9)
    asked.avoided.add(failed.ref)

    assert ("p", "d1") == chosen(asked, [prefill()], [failed, decode("d1", free=4)])
    assert None is chosen(asked, [prefill()], [failed, decode("d1", free=1)])
    assert ("p", "d0") == chosen(asked, [prefill()], [failed, decode("small", blocks=3)])
    assert ("p", "d0") == chosen(asked, [prefill()], [failed])


@pytest.mark.parametrize(("delivered", "free", "fits"), [(0, 3, True), (0, 2, False), (12, 5, True), (13, 5, False)])
def test_decode_needs_room_for_the_beginning(delivered: int, free: int, fits: bool) -> None:
    """Prompt, delivered tokens with as many more as make them worth it, and a block; never the whole answer."""
    asked = waiter(20, 160)
    asked.num_delivered = delivered

    assert fits == (chosen(asked, [prefill()], [decode(free=free)]) is not None)
    assert None is chosen(waiter(20, 161), [prefill()], [decode()])


@pytest.mark.parametrize(("num_running", "fits"), [(2, True), (3, False)])
def test_decode_keeps_a_block_for_each_that_runs(num_running: int, fits: bool) -> None:
    """Five free, three needed: what it would refuse is not asked."""
    asked = decode(free=5)
    asked.capacity = Capacity(blocks={"free": 5}, sequences={"running": num_running, "waiting_kv": 9})

    assert fits == (chosen(waiter(20, 160), [prefill()], [asked]) is not None)


def test_the_kept_pair_stays_the_same() -> None:
    """While it can serve the request; else the nearest to having room."""
    asked = waiter(20, 150)
    decodes = [decode("small", blocks=5), decode("d0", free=3), decode("d1", free=6)]
    pair = placement.pair_to_keep(asked, [prefill()], decodes)
    assert pair is not None
    assert "d1" == pair.decode.worker_id
    asked.held_pair = (WorkerId("p"), WorkerId("d0"))
    pair = placement.pair_to_keep(asked, [prefill()], decodes)
    assert pair is not None
    assert "d0" == pair.decode.worker_id


def test_never_fits_names_what_is_needed_and_what_is_there() -> None:
    """In blocks and in tokens; of the pool that is too small."""
    error = placement.refusal(waiter(20, 200), [prefill()], [decode()])
    assert error is not None
    assert ErrorCode.NEVER_FITS is error.code
    assert {"13", "200", "10", "160"} <= set(error.message.replace("(", "").split())
    error = placement.refusal(waiter(170, 180), [prefill()], [decode(blocks=20)])
    assert error is not None
    assert (
        "the prompt needs 11 KV blocks (170 tokens); the largest prefill pool has 10 blocks (160 tokens)"
        == error.message
    )


def test_no_capacity_where_someone_could_but_is_not_there() -> None:
    """Never a 400 for what is only away; a worker that is about to be ready counts."""
    large = decode("large", blocks=20)
    large.state = WorkerState.LOST
    error = placement.refusal(waiter(20, 200), [prefill()], [decode(), large])
    assert error is not None
    assert ErrorCode.NO_CAPACITY is error.code
    large.state = WorkerState.STARTING
    assert None is placement.refusal(waiter(20, 200), [prefill()], [decode(), large])
    error = placement.refusal(waiter(), [], [decode()])
    assert error is not None
    assert ErrorCode.NO_CAPACITY is error.code
