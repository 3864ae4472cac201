"""The decode worker's table of (request, attempt): commands of the scheduler in, numbered events out.

Streams, copies and the engine's thread call in from outside and find their row here; none of them owns one. Everything
runs in the event loop and nothing waits. Blocks go back in `_settle` alone, when no copy and no step can touch them.
Who gets blocks, and who leaves when they run short, is decided in `growth`.
"""

import secrets
from collections.abc import Mapping
from dataclasses import replace

from structlog.typing import FilteringBoundLogger

from decode_worker import reports
from decode_worker.grower import DecodeEngine, Grower
from decode_worker.growth import check_fits, num_blocks_at_start
from decode_worker.lapse import Lapse, lapsed
from decode_worker.outbox import Outbox, outbox_capacity
from decode_worker.reports import EventSink
from decode_worker.reservations import Refusal, Reservation, Reservations
from decode_worker.sequence import HeldSequence, Stage, TokenReader, hold
from shared.codec import worker_events
from shared.codec.request import deadline_from_wire, key_from_wire, spec_from_wire
from shared.domain.clock import Clock
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Epoch, Incarnation, RequestKey, TokenId, TransferId, WorkerId
from shared.domain.refusals import RefusedKind
from shared.domain.request import FinishReason, RequestSpec
from shared.domain.worker import KvTarget
from shared.engine.decode_runner import DecodeSequence, DecodeStep, Join, Leave
from shared.engine.executor import SampledToken
from shared.kv.block_pool import BlockPool
from shared.kv.frames import RejectCode
from shared.kv.layout import KvLayout
from shared.obs.metrics import Metrics
from shared.transfer.handshake import TRANSPORTS
from shared.wire import scheduler_pb2

ROWS_A_SEQUENCE = 16  # rows that only wait for a slow reader hold no blocks; so many of them for each place
TICKET_BYTES = 16


class DecodeService:
    """Call `connect` before anything else.

    `shares_answers`: prefill's numbers are the same as ours, so that prompts may reuse the KV of generated tokens.
    """

    def __init__(
        self,
        *,
        worker_id: WorkerId,
        incarnation: Incarnation,
        layout: KvLayout,
        eos_ids: frozenset[TokenId],
        pool: BlockPool,
        max_sequences: int,
        outbox_tokens: int,
        outbox_bytes: int,
        shares_answers: bool,
        transports: tuple[str, ...] = TRANSPORTS,
        clock: Clock,
        metrics: Metrics,
        log: FilteringBoundLogger,
    ) -> None:
        self._incarnation = incarnation
        self._target = KvTarget(
            worker_id=worker_id, address="", incarnation=incarnation, transfer_id=TransferId(0), transports=transports
        )
        self._layout = layout
        self._eos_ids = eos_ids
        self._pool = pool
        self._max_rows = max_sequences * ROWS_A_SEQUENCE
        self._outbox_tokens, self._outbox_bytes = outbox_tokens, outbox_bytes
        self._shares_answers = shares_answers
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._reservations = Reservations(pool=pool, block_size=layout.block_size, max_sequences=max_sequences)
        self._rows: dict[RequestKey, HeldSequence] = {}
        self._engine_error: ServingError | None = None
        self.is_draining = False

    def connect(self, engine: DecodeEngine, events: EventSink, *, address: str) -> None:
        """The two that the table speaks to, and what others dial; they are made with the table and so come later."""
        self._target = replace(self._target, address=address)
        self._engine = engine
        self._events = events
        self._grower = Grower(
            rows=self._rows,
            reservations=self._reservations,
            layout=self._layout,
            engine=engine,
            clock=self._clock,
            preempt=lambda row: self._preempt(row, "blocks"),
        )

    # ---- what the process asks

    @property
    def is_idle(self) -> bool:
        """Nothing is held that someone still waits for."""
        return all(row.is_done_reported for row in self._rows.values()) and len(self._reservations) == 0

    @property
    def num_outbox_tokens(self) -> int:
        return sum(len(row.outbox) for row in self._rows.values())

    def block_counts(self) -> dict[str, int]:
        """State -> blocks, all states."""
        return {state.value: count for state, count in self._pool.counts().items()}

    def sequence_counts(self) -> Mapping[str, int]:
        """State -> sequences, all states."""
        return reports.sequence_counts(self._rows.values())

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, index and holders agree, and who holds blocks has a row."""
        self._reservations.check_integrity()
        if not all(key in self._rows for key in self._reservations.holders()):
            raise AssertionError("blocks are held for an attempt that is not here")

    def sweep(self) -> None:
        """Call it now and then: what ends without a message ends here."""
        now = self._clock.monotonic()
        expired = self._reservations.expired(now)
        for row in list(self._rows.values()):
            verdict = lapsed(row, now, has_lease=row.key not in expired)
            if isinstance(verdict, ServingError):
                self._fail(row, verdict)
            elif verdict is Lapse.PARKED:
                self._preempt(row, "parked")
            elif verdict is Lapse.FORGOTTEN:
                self._forget(row)
        self._grower.look_again()

    def hand_over(self) -> None:
        """The time of the drain is over: whatever has not ended goes on at another worker."""
        for row in list(self._rows.values()):
            if not row.is_broken_off and not row.is_done_reported and row.release_epoch is None:
                self._preempt(row, "drain")

    # ---- the session's handler

    def handle_command(self, command: scheduler_pb2.Command, epoch: Epoch) -> None:
        key = key_from_wire(command.key)
        match command.WhichOneof("command"):
            case "reserve":
                self._reserve(key, command.reserve, epoch)
            case "abort" | "release":
                self._let_go(key, epoch)
            case _:  # Prefill is not for this role
                self._metrics.refused(RefusedKind.UNKNOWN_COMMAND)

    def inventory(self) -> scheduler_pb2.Inventory:
        return reports.inventory(self._rows.values(), self._reservations.ended(self._clock.monotonic()))

    def heartbeat(self) -> scheduler_pb2.Heartbeat:
        return scheduler_pb2.Heartbeat(
            blocks=self.block_counts(),
            sequences=self.sequence_counts(),
            last_step_age_ms=round(self._engine.last_step_age() * 1000),
            busy=self._engine.is_busy,
            draining=self.is_draining or self._engine_error is not None,
        )

    def _reserve(self, key: RequestKey, reserve: scheduler_pb2.Reserve, epoch: Epoch) -> None:
        now = self._clock.monotonic()
        held = self._reservations.find(key)
        if held is not None:  # asked again: the same answer
            self._report_reserved(key, epoch, held)
            return
        if key in self._rows or self._reservations.has_ended(key, now):
            self._metrics.refused(RefusedKind.LATE_RESERVE)
            return
        try:
            spec = spec_from_wire(reserve.spec)
            check_fits(self._layout, spec, pool_blocks=self._pool.num_blocks)
        except ServingError as error:
            self._events.post(worker_events.attempt_failed(key, epoch, error=error))
            return
        delivered = tuple(map(TokenId, reserve.delivered_ids))
        granted = self._grant(key, spec, len(delivered), now)
        if isinstance(granted, Refusal):
            self._log.debug("reservation refused", key=str(key), needed=granted.needed_blocks, free=granted.free_blocks)
            self._events.post(
                worker_events.reserve_refused(
                    key, epoch, needed_blocks=granted.needed_blocks, free_blocks=granted.free_blocks
                )
            )
            return
        capacity = outbox_capacity(
            max_tokens=self._outbox_tokens,
            max_bytes=self._outbox_bytes,
            has_stop_strings=spec.has_stop_strings,
            top_logprobs=spec.sampling.top_logprobs,
        )
        row = self._rows[key] = hold(
            spec,
            granted,
            delivered=delivered,
            epoch=epoch,
            layout=self._layout,
            incarnation=self._incarnation,
            outbox=Outbox(capacity=capacity, num_delivered=len(delivered)),
            deadline=deadline_from_wire(reserve.timeout_ms, now),
            now=now,
        )
        num_hit = granted.num_shared * self._layout.block_size
        self._metrics.prefix_looked_up(num_hit, spec.num_prompt_tokens - num_hit, self._reservations.take_evictions())
        self._log.debug("reserved", key=str(key), blocks=len(granted.blocks), prompt_tokens=spec.num_prompt_tokens)
        self._report_reserved(key, epoch, granted)
        if row.close_if_delivered(self._eos_ids):
            self._end(row)
        else:
            self._join_when_whole(row)  # a continued answer whose prompt is all here

    def _grant(self, key: RequestKey, spec: RequestSpec, num_delivered: int, now: float) -> Reservation | Refusal:
        """Running sequences come first: a block for each of them stays available."""
        num_blocks = num_blocks_at_start(self._layout, spec, num_delivered=num_delivered)
        if self.is_draining or self._engine_error is not None or len(self._rows) >= self._max_rows:
            return Refusal(needed_blocks=num_blocks, free_blocks=0)
        return self._reservations.grant(
            key,
            spec,
            num_blocks=num_blocks,
            num_kept=sum(self._rows[held].is_in_engine for held in self._reservations.holders()),
            transfer_id=TransferId(secrets.randbits(64)),
            attach_ticket=secrets.token_bytes(TICKET_BYTES),
            now=now,
        )

    def _let_go(self, key: RequestKey, epoch: Epoch) -> None:
        row = self._rows.get(key)
        if row is None:
            work = self._reservations.bury_unknown(key, self._clock.monotonic())
            self._events.post(worker_events.released(key, epoch, blocks_freed=0, work=work))
            return
        row.release_epoch = epoch
        self._end(row)

    # ---- the hand-over

    def find(self, key: RequestKey) -> HeldSequence | RejectCode:
        """The row that KV arrives for, or why there is none."""
        if (row := self._rows.get(key)) is not None:
            return row
        has_ended = self._reservations.has_ended(key, self._clock.monotonic())
        self._metrics.refused(RefusedKind.LATE_TRANSFER if has_ended else RefusedKind.UNKNOWN_TRANSFER)
        return RejectCode.GONE if has_ended else RejectCode.UNKNOWN_TRANSFER

    def sign(self, row: HeldSequence) -> None:
        """The sender lives and holds the job."""
        self._reservations.sign(row.key, self._clock.monotonic())

    def take_first_token(self, row: HeldSequence, token: SampledToken, cached_tokens: int) -> RejectCode | None:
        """Token 1 goes to the reader at once; a repeat is accepted and changes nothing."""
        if row.first_token is not None or row.delivered:
            self._metrics.refused(RefusedKind.DOUBLED_FIRST_TOKEN)
            return None
        if row.stage is Stage.ENDED:
            return row.reject_code
        self.sign(row)
        row.moments.first_token_at = self._clock.monotonic()
        finish = row.take_first(token, cached_tokens, self._eos_ids)
        row.touch_reader()
        if finish is not None:
            self._end(row)
        else:
            self._join_when_whole(row)
        return None

    def copy_returned(self, row: HeldSequence, num_bytes: int) -> None:
        """A copy into the row's blocks has ended, and its receiver knows."""
        row.kv_bytes += num_bytes
        self.sign(row)
        self._join_when_whole(row)
        self._settle(row)

    def fail_transfer(self, row: HeldSequence, error: ServingError) -> None:
        """The KV cannot become whole any more."""
        if row.stage is not Stage.ENDED:
            self._fail(row, error)

    def _join_when_whole(self, row: HeldSequence) -> None:
        if row.stage is not Stage.RECEIVING or not row.outputs or not row.receiver.is_complete:
            return
        now = self._clock.monotonic()
        self._reservations.commit(row.key)
        row.stage = Stage.JOINING
        row.is_in_engine = True
        row.moments.committed_at = row.unattended_since = row.moved_at = now
        row.granted_upto = row.outbox.may_compute_upto
        self._engine.submit(
            Join(
                sequence=DecodeSequence(
                    key=row.key,
                    spec=row.spec,
                    block_table=row.block_table,
                    outputs=tuple(row.outputs),
                    may_compute_upto=row.granted_upto,
                )
            )
        )
        self._grower.grow(row)

    # ---- the engine

    def on_step(self, step: DecodeStep) -> None:
        """The report of one step."""
        reports.count_step(self._metrics, step, self._rows)
        now = self._clock.monotonic()
        for key in step.joined:
            row = self._rows.get(key)
            if row is not None and row.stage is Stage.JOINING:
                row.stage = Stage.RUNNING
                row.is_checked = True
                self._reservations.publish(key, row.spec.prompt_ids, salt=row.spec.kv_salt)
                self._log.debug("committed", key=str(key), kv_bytes=row.kv_bytes)
                self._events.post(worker_events.kv_committed(key, row.epoch, num_bytes=row.kv_bytes))
        for token in step.tokens:
            row = self._rows[token.key]
            row.is_in_engine = token.finish is None
            if row.stage is Stage.ENDED:  # made while its Leave was on the way
                self._settle(row)
                continue
            row.take(token.index, token.sampled, token.finish)
            row.moved_at = now
            row.touch_reader()
            if token.finish is not None:
                self._end(row)
        for key, fault in step.faults.items():
            row = self._rows[key]
            row.is_in_engine = False
            if fault.code is ErrorCode.KV_CORRUPT:
                self._reservations.withdraw(key)
            if row.stage is Stage.ENDED:
                self._settle(row)
            else:
                self._fail(row, fault)
        for key in step.left:
            row = self._rows.get(key)
            if row is not None:
                row.is_in_engine = False
                self._settle(row)
        self._grower.moved(token.key for token in step.tokens)  # when what has come back is back

    def on_engine_dead(self) -> None:
        """No step will ever touch a block again: everything that needed one fails."""
        self._engine_error = ServingError(ErrorCode.INTERNAL, "internal error")
        for row in list(self._rows.values()):
            row.is_in_engine = False
            if row.stage is Stage.ENDED:
                self._settle(row)
            else:
                self._fail(row, self._engine_error)
        self._events.heartbeat_soon()

    # ---- the gateways

    def attach(self, key: RequestKey, *, ticket: bytes, from_index: int, reader: TokenReader, session: int = 0) -> None:
        """The reader gets the tokens from `from_index` on, an earlier reader no more. Raises ServingError."""
        row = self._rows.get(key)
        if row is None or row.is_broken_off:
            raise ServingError(ErrorCode.REQUEST_NOT_FOUND, "the attempt is not held here")
        if not secrets.compare_digest(ticket, row.attach_ticket):
            self._metrics.refused(RefusedKind.BAD_TICKET)
            raise ServingError(ErrorCode.PERMISSION_DENIED, "the attach ticket is not of this attempt")
        if session < row.session:
            self._metrics.refused(RefusedKind.STALE_SESSION)
        row.read_from(from_index, reader, session)

    def ack(self, key: RequestKey, index: int, reader: TokenReader, session: int = 0) -> None:
        """Tokens 1..index are delivered: room for the engine to go on."""
        row = self._read_by(key, reader, session)
        if row is None:
            return
        if not row.outbox.ack(index):
            if index != len(row.delivered):  # what its reader had before, said with its first attach
                self._metrics.refused(RefusedKind.LATE_ACK)
            return
        if row.stage is Stage.ENDED:
            self._report_done(row)
            return
        row.moved_at = self._clock.monotonic()
        upto = row.outbox.may_compute_upto
        # The engine hears of room in quarters of the outbox: a command a token would be as many as the tokens.
        if row.is_in_engine and upto - row.granted_upto >= max(1, row.outbox.capacity // 4):
            row.granted_upto = upto
            self._grower.grant(row)
            self._grower.grow(row)

    def finish(self, key: RequestKey, index: int, reason: FinishReason, reader: TokenReader, session: int = 0) -> None:
        """The gateway has the whole answer; a repeat changes nothing. Raises ServingError for an impossible one."""
        row = self._read_by(key, reader, session)
        if row is None:
            return
        try:
            row.outbox.finish(index, reason)
        except ValueError as error:
            raise ServingError(ErrorCode.INVALID_REQUEST, str(error)) from error
        self._end(row)

    def detach(self, key: RequestKey, reader: TokenReader) -> None:
        """The reader wants no more of it. Ends nothing."""
        row = self._rows.get(key)
        if row is not None and row.reader is reader:
            row.reader = None
            row.unattended_since = self._clock.monotonic()

    def detach_all(self, reader: TokenReader) -> None:
        """The reader's stream has ended."""
        for row in list(self._rows.values()):
            self.detach(row.key, reader)

    def _read_by(self, key: RequestKey, reader: TokenReader, session: int) -> HeldSequence | None:
        """The row, if this reader has it: what a replaced reader or an older session says does not count."""
        row = self._rows.get(key)
        if row is None or row.reader is not reader:
            self._metrics.refused(RefusedKind.LATE_READER)
            return None
        if session < row.session:
            self._metrics.refused(RefusedKind.STALE_SESSION)
            return None
        return row

    # ---- ends

    def _end(self, row: HeldSequence) -> None:
        """No more KV, no more steps. Idempotent."""
        if row.stage is not Stage.ENDED:
            row.stage = Stage.ENDED
            row.moments.ended_at = self._clock.monotonic()
            row.unattended_since = row.moments.ended_at
            row.receiver.end()
            if row.is_in_engine:
                self._engine.submit(Leave(key=row.key))
        self._report_done(row)
        self._settle(row)

    def _fail(self, row: HeldSequence, error: ServingError) -> None:
        if row.is_broken_off:
            return
        row.error = error
        self._log.debug("attempt failed", key=str(row.key), code=error.code.value, stage=row.stage.value)
        self._break_off(row, worker_events.attempt_failed(row.key, row.epoch, error=error))

    def _preempt(self, row: HeldSequence, cause: str) -> None:
        row.is_preempted = True
        self._metrics.preemptions_total.add(cause)
        self._log.debug("preempted", key=str(row.key), cause=cause, blocks=len(row.block_table))
        self._break_off(row, worker_events.preempted(row.key, row.epoch))

    def _break_off(self, row: HeldSequence, event: scheduler_pb2.WorkerEvent) -> None:
        if row.reader is not None:
            row.reader.flush(row)  # what was made before is the client's
            row.reader = None
        self._events.post(event)
        self._end(row)

    def _settle(self, row: HeldSequence) -> None:
        """Give the blocks back once nothing touches them, and answer who waits for that."""
        if not row.is_settled:
            return
        if self._shares_answers and row.error is None and row.is_checked:
            self._reservations.publish(row.key, row.computed_prefix, salt=row.spec.kv_salt)
        freed = self._reservations.free(row.key)
        row.blocks_freed += freed
        if freed:
            self._events.heartbeat_soon()
        if row.release_epoch is not None:
            self._events.post(worker_events.released(row.key, row.release_epoch, blocks_freed=freed, work=row.work))
        if row.release_epoch is not None or row.is_broken_off:
            self._forget(row)
        if freed:
            self._grower.blocks_returned()

    def _forget(self, row: HeldSequence) -> None:
        if self._rows.pop(row.key, None) is None:
            return
        self._reservations.bury(row.key, self._clock.monotonic(), work=row.work)
        self._events.heartbeat_soon()  # a place is free again
        self._log.info("attempt ended", **reports.ended_fields(row))

    def _report_reserved(self, key: RequestKey, epoch: Epoch, held: Reservation) -> None:
        target = replace(
            self._target, transfer_id=held.transfer_id, tokens_held=held.num_shared * self._layout.block_size
        )
        self._events.post(worker_events.reserved(key, epoch, target=target, attach_ticket=held.attach_ticket))

    def _report_done(self, row: HeldSequence) -> None:
        """The answer has ended and is with the gateway, all of it; told once, and not to who has aborted it."""
        end = row.outbox.end
        if end is None or not row.outbox.is_done or row.is_done_reported or row.release_epoch is not None:
            return
        row.is_done_reported = True
        self._events.post(
            worker_events.sequence_done(row.key, row.epoch, reason=end.reason, completion_tokens=end.index)
        )
