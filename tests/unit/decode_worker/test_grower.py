"""Growth done: blocks from the pool into the table of a row, or someone leaves."""

import pytest

from decode_worker.grower import Grower
from decode_worker.growth import KEPT_TOKENS
from decode_worker.outbox import Outbox
from decode_worker.reservations import Reservation, Reservations
from decode_worker.sequence import HeldSequence, Stage, hold
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId, RequestKey, TokenId, TransferId
from shared.domain.request import RequestSpec
from shared.domain.sampling import SamplingParams
from shared.engine.decode_runner import DecodeCommand, Grant
from shared.engine.executor import SampledToken
from shared.kv.block_pool import BlockPool
from shared.kv.layout import KvLayout
from tests.support.hand_clock import HandClock
from tests.support.worker_fakes import FakeEngine

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32", block_size=4, numerics=b"n")


class Running:
    """Rows that run, in a small pool; a victim's blocks come back when the test says so."""

    def __init__(self, num_blocks: int = 12) -> None:
        self.clock = HandClock()
        self.pool = BlockPool(num_blocks)
        self.reservations = Reservations(pool=self.pool, block_size=4, max_sequences=9)
        self.rows: dict[RequestKey, HeldSequence] = {}
        self.engine: FakeEngine[DecodeCommand] = FakeEngine()
        self.left: list[HeldSequence] = []
        self.grower = Grower(
            rows=self.rows,
            reservations=self.reservations,
            layout=LAYOUT,
            engine=self.engine,
            clock=self.clock,
            preempt=self.preempt,
        )

    def preempt(self, row: HeldSequence) -> None:
        """It leaves the engine, which still has a step under way."""
        row.stage = Stage.ENDED
        self.left.append(row)

    def settle(self, row: HeldSequence) -> None:
        """That step has ended."""
        self.reservations.free(row.key)
        del self.rows[row.key]
        self.grower.blocks_returned()

    def row(self, name: str, num_blocks: int, *, delivered: tuple[TokenId, ...] = ()) -> HeldSequence:
        """Four prompt tokens; runs with so many blocks."""
        spec = RequestSpec(
            request_id=RequestId(name),
            prompt_ids=tuple(TokenId(ord(name)) for _ in range(4)),
            max_tokens=40,
            sampling=SamplingParams(seed=1),
        )
        key = RequestKey(spec.request_id, Attempt(1))
        granted = self.reservations.grant(
            key, spec, num_blocks=num_blocks, transfer_id=TransferId(1), attach_ticket=b"", now=0.0
        )
        assert isinstance(granted, Reservation)
        self.reservations.commit(key)
        row = self.rows[key] = hold(
            spec,
            granted,
            delivered=delivered,
            epoch=Epoch(1),
            layout=LAYOUT,
            incarnation=Incarnation(9),
            outbox=Outbox(capacity=40, num_delivered=len(delivered)),
            now=0.0,
        )
        row.stage = Stage.RUNNING
        row.is_in_engine = True
        row.granted_upto = 40
        row.moved_at = self.clock.monotonic()
        return row

    def move(self, row: HeldSequence, upto: int, *, is_read: bool = True) -> None:
        """Tokens up to that one are made, and sent to a reader."""
        while row.outbox.last_index < upto:
            row.take(row.outbox.last_index + 1, SampledToken(token_id=TokenId(1)), None)
        if is_read:
            row.next_unsent = upto + 1
        self.grower.moved([row.key])


@pytest.fixture
def running() -> Running:
    """Nobody runs yet."""
    return Running()


def test_blocks_come_before_they_are_needed(running: Running) -> None:
    """Three tokens after a block has begun the next but one is there, and the engine knows."""
    row = running.row("a", 4)
    running.move(row, 4)  # 4 + 4 + 8 tokens: the four blocks are enough
    assert running.engine.commands == []
    running.move(row, 5)

    assert len(row.block_table) == 5
    assert running.engine.commands == [Grant(key=row.key, upto_index=40, block_table=row.block_table)]
    assert running.pool.num_available == 7


def test_the_youngest_leaves_and_the_oldest_goes_on(running: Running) -> None:
    """Not before the victim's blocks are back; what is left over is free."""
    old, young = running.row("a", 4), running.row("b", 8)
    running.move(old, 5)
    assert running.left == [young]
    assert len(old.block_table) == 4
    running.move(old, 6)  # short already: nobody else leaves
    assert running.left == [young]
    running.settle(young)

    assert len(old.block_table) == 5
    assert running.pool.num_available == 7


def test_one_that_is_the_youngest_leaves_itself(running: Running) -> None:
    """Those before it need not make room."""
    running.row("a", 8)
    young = running.row("b", 4)
    running.move(young, 5)

    assert running.left == [young]


def test_one_that_came_back_leaves_when_it_has_sent_its_tokens() -> None:
    """The older one waits, and has the blocks then."""
    running = Running(num_blocks=15)
    old, back = running.row("a", 4), running.row("b", 11, delivered=(TokenId(1),))
    running.move(old, 5)
    running.move(back, KEPT_TOKENS)  # one less, for it began with token 1
    running.grower.look_again()
    assert running.left == []
    assert len(old.block_table) == 4
    running.move(back, KEPT_TOKENS + 1)
    assert running.left == [back]
    running.settle(back)

    assert len(old.block_table) == 5


def test_one_that_came_back_stays_until_its_reader_is_there() -> None:
    """What it makes before that would be lost with it; but it gets no more blocks than it came with."""
    running = Running(num_blocks=14)
    old, back = running.row("a", 4), running.row("b", 10, delivered=(TokenId(1),))
    running.move(old, 5)
    running.move(back, KEPT_TOKENS + 4, is_read=False)
    assert running.left == []
    running.move(back, KEPT_TOKENS + 5, is_read=False)
    assert running.left == [back]


def test_one_that_came_back_and_is_not_read_leaves(running: Running) -> None:
    """It is found out without a step: it makes none."""
    old, back = running.row("a", 4), running.row("b", 8, delivered=(TokenId(1),))
    running.move(old, 5)
    assert running.left == []
    back.granted_upto = 1
    running.clock.advance(0.5)
    running.grower.look_again()

    assert running.left == [back]


def test_who_has_ended_or_has_no_credit_wants_nothing(running: Running) -> None:
    """Its reader decides how far it goes."""
    row = running.row("a", 4)
    row.granted_upto = 5
    running.move(row, 5)
    row.granted_upto = 40
    row.stage = Stage.ENDED
    running.move(row, 9)

    assert len(row.block_table) == 4
    assert running.engine.commands == []


@pytest.mark.parametrize(("waiting_s", "expected"), [(0.4, "b"), (0.5, "a")])
def test_who_waits_for_his_reader_goes_first_unless_that_is_a_moment(
    running: Running, waiting_s: float, expected: str
) -> None:
    """With stop strings an outbox is full whenever the reader is a round trip behind."""
    parked = running.row("a", 4)
    parked.granted_upto = 5
    running.move(parked, 5)
    running.clock.advance(waiting_s)
    running.move(running.row("b", 8), 21)

    assert [row.key.request_id for row in running.left] == [expected]
