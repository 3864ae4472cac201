"""Gives the running sequences their blocks, ahead of need; where blocks are short, has someone leave.

What is decided is in `growth`; here it is done. Runs in the event loop and waits for nothing: blocks that come back
later are shared out by the next call.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from decode_worker.growth import KEPT_TOKENS, PARKED_VICTIM_S, Claim, num_blocks_ahead, share_out
from decode_worker.reservations import Reservations
from decode_worker.sequence import HeldSequence, Stage
from shared.domain.clock import Clock
from shared.domain.ids import RequestKey
from shared.engine.decode_runner import DecodeCommand, Grant
from shared.kv.block_table import BlockTable
from shared.kv.layout import KvLayout


class DecodeEngine(Protocol):
    """The step loop, as far as the table needs it."""

    @property
    def is_busy(self) -> bool: ...

    def submit(self, command: DecodeCommand) -> None: ...

    def last_step_age(self) -> float: ...


class Grower:
    """`preempt` ends an attempt, and gives its blocks back now or when nothing touches them any more."""

    def __init__(
        self,
        *,
        rows: Mapping[RequestKey, HeldSequence],
        reservations: Reservations,
        layout: KvLayout,
        engine: DecodeEngine,
        clock: Clock,
        preempt: Callable[[HeldSequence], None],
    ) -> None:
        self._rows = rows
        self._reservations = reservations
        self._layout = layout
        self._engine = engine
        self._clock = clock
        self._preempt = preempt
        self._is_short = False  # a running sequence waits for blocks
        self._awaits_fresh = False  # and a younger one keeps its own for a few tokens

    def grant(self, row: HeldSequence) -> None:
        """Tell the engine of the row's credit and blocks."""
        self._engine.submit(Grant(key=row.key, upto_index=row.granted_upto, block_table=row.block_table))

    def grow(self, row: HeldSequence) -> None:
        """The row has moved or been granted credit."""
        num_wanted = self._num_wanted(row)
        if num_wanted and (self._is_short or not self._extend(row, num_wanted)):
            self._share_out()

    def blocks_returned(self) -> None:
        """Whoever waits may have them."""
        if self._is_short:
            self._share_out()

    def moved(self, keys: Iterable[RequestKey]) -> None:
        """A step has made tokens of these; some may be gone."""
        for key in keys:
            if (row := self._rows.get(key)) is not None:
                self.grow(row)
        self.look_again()

    def look_again(self) -> None:
        """Who was kept for its next tokens may have sent them, or have lost its reader."""
        if self._awaits_fresh:
            self._share_out()

    def _num_wanted(self, row: HeldSequence) -> int:
        """Blocks that it needs to go on, beside those that it has."""
        if not row.is_in_engine or row.stage is Stage.ENDED:
            return 0
        wanted = num_blocks_ahead(self._layout, row.spec, last_index=row.outbox.last_index, upto_index=row.granted_upto)
        return max(wanted - len(row.block_table), 0)

    def _extend(self, row: HeldSequence, num_blocks: int) -> bool:
        blocks = self._reservations.grow(row.key, num_blocks)
        if blocks is None:
            return False
        row.block_table = BlockTable(blocks, self._layout.block_size)
        self.grant(row)
        return True

    def _share_out(self) -> None:
        """The oldest are served, and victims leave until what comes back is enough."""
        # Before anyone leaves: a victim whose blocks are back at once does not lead here again.
        self._is_short = self._awaits_fresh = False
        now = self._clock.monotonic()
        while True:
            held = [self._rows[key] for key in self._reservations.holders()]
            claims = [
                Claim(
                    key=row.key,
                    num_blocks=len(row.block_table),
                    num_wanted=self._num_wanted(row),
                    is_parked=row.is_parked and now - row.moved_at >= PARKED_VICTIM_S,
                    is_fresh=bool(row.delivered) and row.is_in_engine and row.num_sent < KEPT_TOKENS,
                )
                for row in held
                if row.stage is not Stage.ENDED
            ]
            shares = share_out(
                claims,
                num_available=self._reservations.num_available,
                num_returning=sum(len(row.block_table) for row in held if row.stage is Stage.ENDED),
            )
            for key, num_blocks in shares.grants:
                self._extend(self._rows[key], num_blocks)
            for key in shares.victims:
                self._preempt(self._rows[key])
            if not shares.victims:
                break
        self._is_short, self._awaits_fresh = shares.is_short, shares.awaits_fresh
