"""The prefill worker's table of (request, attempt): commands of the scheduler in, numbered events out.

The engine's thread and the senders find their job here; none of them owns one. Everything runs in the event loop and
nothing waits. Blocks go back in `_settle` alone, when no read and no step can touch them.
"""

from collections import deque
from collections.abc import Mapping
from typing import Protocol

from structlog.typing import FilteringBoundLogger

from prefill_worker.job import Moments, PrefillJob
from shared.codec import worker_events
from shared.codec.kv import target_from_wire
from shared.codec.request import deadline_from_wire, key_from_wire, spec_from_wire
from shared.domain.clock import Clock
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Epoch, RequestKey
from shared.domain.lifecycle import deadline_exceeded
from shared.domain.refusals import RefusedKind
from shared.domain.request import RequestSpec, SequenceState
from shared.domain.worker import NO_WORK, Work
from shared.engine.prefill_runner import AddPrompt, DropPrompt, PrefillCommand, PrefillStep
from shared.kv.block_pool import BlockPool
from shared.kv.block_table import BlockTable
from shared.kv.frame_plan import LayersDone
from shared.kv.layout import KvLayout
from shared.kv.prefix_cache import PrefixCache
from shared.obs.metrics import Metrics
from shared.transfer.tombstones import Tombstones
from shared.wire import scheduler_pb2


class PrefillEngine(Protocol):
    """The step loop, as far as the table needs it."""

    @property
    def is_busy(self) -> bool: ...

    def submit(self, command: PrefillCommand) -> None: ...

    def last_step_age(self) -> float: ...


class EventSink(Protocol):
    """The session with the scheduler, as far as the table needs it."""

    def post(self, event: scheduler_pb2.WorkerEvent) -> None: ...

    def heartbeat_soon(self) -> None: ...


class Senders(Protocol):
    """Whoever carries KV and token 1 to decode."""

    def start(self, job: PrefillJob) -> None:
        """Send what there is and what comes, until `job.stopped`; ends with `sent`, `dropped` or `send_failed`."""
        ...


class PrefillService:
    """Call `connect` before anything else."""

    def __init__(
        self,
        *,
        layout: KvLayout,
        pool: BlockPool,
        max_sequences: int,
        clock: Clock,
        metrics: Metrics,
        log: FilteringBoundLogger,
    ) -> None:
        self._layout = layout
        self._pool = pool
        self._prefixes = PrefixCache(pool, layout.block_size)
        self._max_sequences = max_sequences
        self._clock = clock
        self._metrics = metrics
        self._log = log
        self._jobs: dict[RequestKey, PrefillJob] = {}
        self._waiting: deque[PrefillJob] = deque()  # for blocks, oldest first; at most `max_sequences`
        self._tombstones = Tombstones()
        self._engine_error: ServingError | None = None
        self.is_draining = False

    def connect(self, engine: PrefillEngine, events: EventSink, senders: Senders) -> None:
        """Those that the table speaks to; they are made with it and so come later."""
        self._engine = engine
        self._events = events
        self._senders = senders

    # ---- what the process asks

    @property
    def is_idle(self) -> bool:
        """Nothing is held."""
        return not self._jobs

    def block_counts(self) -> dict[str, int]:
        """State -> blocks, all states."""
        return {state.value: count for state, count in self._pool.counts().items()}

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks and index agree, and every block in use is some job's."""
        self._prefixes.check_integrity()
        num_held = sum(len(job.blocks) for job in self._jobs.values())
        if num_held < self._pool.num_blocks - self._pool.num_available:
            raise AssertionError("a block is held by no job")

    def sweep(self) -> None:
        """Call it now and then: nothing is computed or sent for a client whose time is over."""
        now = self._clock.monotonic()
        for job in list(self._jobs.values()):
            if job.deadline is not None and now >= job.deadline:
                self._fail(job, deadline_exceeded())

    def hand_over(self) -> None:
        """The time of the drain is over: whatever is not with decode yet goes on at another worker."""
        for job in list(self._jobs.values()):
            self._fail(job, ServingError(ErrorCode.DRAINING, "the worker is being stopped"))

    # ---- the session's handler

    def handle_command(self, command: scheduler_pb2.Command, epoch: Epoch) -> None:
        key = key_from_wire(command.key)
        match command.WhichOneof("command"):
            case "prefill":
                self._accept(key, command.prefill, epoch)
            case "abort" | "release":
                self._let_go(key, epoch)
            case _:  # Reserve is not for this role
                self._metrics.refused(RefusedKind.UNKNOWN_COMMAND)

    def inventory(self) -> scheduler_pb2.Inventory:
        held = [worker_events.inventory_entry(job.key, job.sequence_state) for job in self._jobs.values()]
        ended = self._tombstones.keys(self._clock.monotonic())
        return scheduler_pb2.Inventory(
            entries=[*held, *(worker_events.inventory_entry(key, SequenceState.DONE) for key in ended)]
        )

    def heartbeat(self) -> scheduler_pb2.Heartbeat:
        sequences = {state.value: 0 for state in SequenceState}
        for job in self._jobs.values():
            sequences[job.sequence_state.value] += 1
        return scheduler_pb2.Heartbeat(
            blocks=self.block_counts(),
            sequences=sequences,
            queued_prompt_tokens=sum(job.remaining_tokens for job in self._jobs.values()),
            last_step_age_ms=round(self._engine.last_step_age() * 1000),
            busy=self._engine.is_busy,
            draining=self.is_draining or self._engine_error is not None,
        )

    def _accept(self, key: RequestKey, prefill: scheduler_pb2.Prefill, epoch: Epoch) -> None:
        if key in self._jobs:  # asked again: it is on its way
            return
        now = self._clock.monotonic()
        if self._tombstones.find(key, now) is not None:
            self._metrics.refused(RefusedKind.LATE_PREFILL)
            return
        try:
            spec = spec_from_wire(prefill.spec)
            self._check_room(spec)
        except ServingError as error:
            self._log.debug("prefill refused", key=str(key), code=error.code.value)
            self._tombstones.bury(key, now)
            self._events.post(worker_events.attempt_failed(key, epoch, error=error))
            return
        job = PrefillJob(
            key=key,
            spec=spec,
            epoch=epoch,
            target=target_from_wire(prefill.target),
            moments=Moments(received_at=now),
            deadline=deadline_from_wire(prefill.timeout_ms, now),
            num_delivered=prefill.num_delivered,
            distrusts_cache=prefill.distrust_cache,
        )
        self._jobs[key] = job
        self._waiting.append(job)
        self._senders.start(job)  # at once: its keep-alives hold the reservation while the prompt waits for its turn
        self._start_waiting()

    def _check_room(self, spec: RequestSpec) -> None:
        """Raises ServingError when the job cannot be taken at all."""
        if self._engine_error is not None:
            raise self._engine_error
        if self.is_draining:
            raise ServingError(ErrorCode.DRAINING, "the worker is being stopped")
        needed = self._layout.num_blocks_for(spec.num_prompt_tokens)
        if needed > self._pool.num_blocks:
            raise ServingError(
                ErrorCode.NEVER_FITS, f"the prompt needs {needed} blocks, the pool has {self._pool.num_blocks}"
            )
        if len(self._jobs) >= self._max_sequences:
            raise ServingError(ErrorCode.NO_CAPACITY, "too many prompts")

    def _start_waiting(self) -> None:
        """The oldest first, and none past it: a long prompt must not starve."""
        while self._waiting:
            job = self._waiting[0]
            if not job.is_over and not self._start(job):
                return
            self._waiting.popleft()

    def _start(self, job: PrefillJob) -> bool:
        """Takes the blocks whose KV is cached and new ones for the rest; False and no change when there are too few.

        The last token of a prompt is always computed: output token 1 comes of it.
        """
        spec = job.spec
        cached = self._prefixes.match(spec.prompt_ids, salt=spec.kv_salt, max_tokens=spec.num_prompt_tokens - 1)
        if job.distrusts_cache:
            self._prefixes.withdraw(cached)
            self._pool.free(cached)
            cached = ()
        new = self._pool.reserve(self._layout.num_blocks_for(spec.num_prompt_tokens) - len(cached))
        if new is None:
            self._pool.free(cached)
            return False
        self._pool.activate(new)
        job.blocks = (*cached, *new)
        job.block_table = BlockTable(job.blocks, self._layout.block_size)
        job.cached_tokens = job.computed_upto = len(cached) * self._layout.block_size
        if cached:
            job.progressed.set()  # they may leave at once
        job.is_in_engine = True
        job.moments.started_at = self._clock.monotonic()
        self._metrics.prefix_looked_up(
            num_hit=job.cached_tokens,
            num_missed=spec.num_prompt_tokens - job.cached_tokens,
            num_evicted=self._prefixes.take_evictions(),
        )
        self._engine.submit(
            AddPrompt(
                key=job.key,
                spec=spec,
                block_table=job.block_table,
                start=job.cached_tokens,
                wants_token=job.num_delivered == 0,
            )
        )
        self._log.debug("prefill started", key=str(job.key), blocks=len(job.blocks), cached_tokens=job.cached_tokens)
        return True

    def _index(self, job: PrefillJob) -> None:
        """Whole blocks of the prompt can be found as soon as they are computed; nothing writes into them any more."""
        size = self._layout.block_size
        first, end = job.indexed_upto // size, job.computed_upto // size
        if end > first:
            job.last_link = self._prefixes.insert(
                job.spec.prompt_ids[first * size : end * size],
                salt=job.spec.kv_salt,
                block_ids=job.blocks[first:end],
                after=job.last_link,
            )
            job.indexed_upto = end * size

    def _let_go(self, key: RequestKey, epoch: Epoch) -> None:
        job = self._jobs.get(key)
        if job is None:
            now = self._clock.monotonic()
            tombstone = self._tombstones.find(key, now)
            if tombstone is None:
                self._tombstones.bury(key, now)
            work = NO_WORK if tombstone is None else tombstone.work
            self._events.post(worker_events.released(key, epoch, blocks_freed=0, work=work))
            return
        job.release_epoch = epoch
        self._end(job)

    # ---- the engine

    def on_step(self, step: PrefillStep) -> None:
        """The report of one step."""
        if step.num_sequences:
            self._metrics.step_sequences.record(step.num_sequences)
            self._metrics.tokens_computed.add(step.num_tokens)
            self._events.heartbeat_soon()
        for chunk in step.chunks:
            job = self._jobs[chunk.key]
            job.computed_upto = chunk.end
            self._index(job)
            if chunk.is_last:
                job.is_in_engine = False
                self._computed(job, step)
            job.progressed.set()
        for key, fault in step.faults.items():
            job = self._jobs[key]
            job.is_in_engine = False
            self._fail(job, fault)
        for key in step.dropped:
            job = self._jobs.get(key)
            if job is not None:
                job.is_in_engine = False
                self._settle(job)

    def on_layers(self, told: Mapping[RequestKey, LayersDone]) -> None:
        """How far the layers of the chunks in the running step are."""
        for key, running in told.items():
            job = self._jobs.get(key)
            if job is not None:
                job.running = running
                job.progressed.set()

    def _computed(self, job: PrefillJob, step: PrefillStep) -> None:
        job.first_token = None if job.num_delivered else step.first_tokens[job.key]
        job.computed.set()
        job.moments.computed_at = self._clock.monotonic()
        if job.is_over:  # its DropPrompt was on the way
            self._settle(job)
            return
        self._log.debug("prefill computed", key=str(job.key), tokens=job.computed_tokens)
        self._events.post(worker_events.prefill_done(job.key, job.epoch, computed_tokens=job.computed_tokens))

    def on_engine_dead(self) -> None:
        """No step will ever touch a block again: what is not computed fails, what is computed is still sent."""
        self._engine_error = ServingError(ErrorCode.INTERNAL, "internal error")
        for job in list(self._jobs.values()):
            job.is_in_engine = False
            if job.is_over:
                self._settle(job)
            elif not job.is_computed:
                self._fail(job, self._engine_error)
        self._events.heartbeat_soon()

    # ---- the senders

    def read_began(self, job: PrefillJob) -> None:
        """The copy thread will read the job's blocks; `read_returned` follows in any case."""
        job.num_reads += 1

    def read_returned(self, job: PrefillJob) -> None:
        job.num_reads -= 1
        self._settle(job)

    def sent(self, job: PrefillJob) -> None:
        """Decode has acknowledged token 1 and the last frame: the job is done here."""
        job.is_sent = True
        self._end(job)

    def dropped(self, job: PrefillJob) -> None:
        """Decode says that the attempt has ended there, and has told the scheduler what it had to tell."""
        self._end(job)

    def send_failed(self, job: PrefillJob, error: ServingError) -> None:
        """The KV cannot be brought to decode."""
        self._fail(job, error)

    # ---- ends

    def _end(self, job: PrefillJob) -> None:
        """No more steps, nothing more sent. Idempotent."""
        if not job.is_over:
            job.is_over = True
            job.moments.ended_at = self._clock.monotonic()
            job.stopped.set()
            if job.is_in_engine:
                self._engine.submit(DropPrompt(key=job.key))
        self._settle(job)

    def _fail(self, job: PrefillJob, error: ServingError) -> None:
        if not job.is_over:
            job.error = error
            self._log.debug("attempt failed", key=str(job.key), code=error.code.value)
            self._events.post(worker_events.attempt_failed(job.key, job.epoch, error=error))
        self._end(job)

    def _settle(self, job: PrefillJob) -> None:
        """Once nothing touches its blocks: give them back, answer who waits for that, remember the end."""
        if not job.is_settled or self._jobs.get(job.key) is not job:
            return
        freed = self._pool.free(job.blocks) if job.blocks else 0
        job.blocks = ()
        work = Work(computed_tokens=job.computed_tokens)
        if job.release_epoch is not None:
            self._events.post(worker_events.released(job.key, job.release_epoch, blocks_freed=freed, work=work))
        del self._jobs[job.key]
        self._tombstones.bury(job.key, self._clock.monotonic(), work=work)
        self._log.info(
            "attempt ended",
            request_id=job.key.request_id,
            attempt=job.key.attempt,
            outcome="failed" if job.error else "sent" if job.is_sent else "aborted",
            code=job.error.code.value if job.error else None,
            prompt_tokens=job.spec.num_prompt_tokens,
            cached_tokens=job.cached_tokens,
            computed_tokens=job.computed_tokens,
            kv_bytes=job.sent_bytes,
            blocks_freed=freed,
            **job.phases_ms(),
        )
        self._events.heartbeat_soon()
        self._start_waiting()
