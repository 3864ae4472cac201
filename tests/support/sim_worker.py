"""A worker as the scheduler's core sees it, simulated: it holds blocks, keeps its reports, and dies when told."""

from collections import deque
from typing import assert_never

from scheduler.messages import (
    AbortJob,
    CoreEvent,
    HeartbeatTold,
    InventoryEntry,
    PrefillJob,
    ReleasedTold,
    ReleaseJob,
    ReportTold,
    ReservedTold,
    ReserveJob,
    ReserveRefusedTold,
    SendCommand,
    SessionId,
    WorkerReport,
)
from shared.domain.ids import Incarnation, RequestKey, TransferId, WorkerId
from shared.domain.request import FinishReason, Role, SequenceState
from shared.domain.worker import Capacity, KvTarget, WorkerFacts, WorkerRef, num_tokens_at_start


class SimWorker:
    """Takes commands in order, holds blocks, reports what a worker would. Starts without a session."""

    def __init__(self, role: Role, name: str, num_blocks: int) -> None:
        self.ref = WorkerRef(WorkerId(name), Incarnation(0))
        self.role = role
        self.session: SessionId | None = None
        self.num_blocks = num_blocks
        self.inbox: deque[SendCommand] = deque()
        self.held: dict[RequestKey, int] = {}
        self.states: dict[RequestKey, SequenceState] = {}
        """Of what is held."""
        self.buried: set[RequestKey] = set()
        self.unacked: list[ReportTold] = []
        self.seen = 0
        self.number = 0

    def restart(self, incarnation: int) -> None:
        """Another process under the same name: all that it held is gone."""
        self.ref = WorkerRef(self.ref.worker_id, Incarnation(incarnation))
        self.held, self.states, self.buried, self.unacked, self.number = {}, {}, set(), [], 0

    def hang_up(self) -> None:
        """What was on the way to it is lost."""
        self.session = None
        self.inbox.clear()
        self.seen = 0

    @property
    def free(self) -> int:
        return self.num_blocks - sum(self.held.values())

    def facts(self) -> WorkerFacts:
        return WorkerFacts(
            role=self.role,
            ref=self.ref,
            address="a",
            admin_url="",
            pid=1,
            layout=b"l",
            block_size=16,
            num_blocks=self.num_blocks,
            max_sequences=4,
            token_budget=32,
        )

    def heartbeat(self, session: SessionId) -> CoreEvent:
        capacity = Capacity(
            commands_seen=self.seen,
            blocks={"free": self.free},
            sequences={"running": len(self.held)},
            queued_prompt_tokens=0,
        )
        return HeartbeatTold(session=session, capacity=capacity)

    def report(self, key: RequestKey, report: WorkerReport) -> ReportTold:
        """Numbered, and kept until acknowledged."""
        self.number += 1
        told = ReportTold(session=self.session or SessionId(0), number=self.number, key=key, report=report)
        self.unacked.append(told)
        return told

    def hold(self, key: RequestKey, num_blocks: int) -> None:
        self.held[key] = num_blocks
        is_prefill = self.role is Role.PREFILL
        self.states[key] = SequenceState.RUNNING if is_prefill else SequenceState.WAITING_KV

    def bury(self, key: RequestKey) -> int:
        """Blocks freed; late commands of the attempt are dropped from now on."""
        self.buried.add(key)
        self.states.pop(key, None)
        return self.held.pop(key, 0)

    def inventory(self) -> tuple[InventoryEntry, ...]:
        """As real workers tell it: rows with their ticket, then tombstones."""
        ticket = b"" if self.role is Role.PREFILL else b"t"
        held = [
            InventoryEntry(
                key=key,
                state=state,
                attach_ticket=ticket,
                last_index=1,
                finish_reason=FinishReason.STOP if state is SequenceState.DONE else None,
            )
            for key, state in self.states.items()
        ]
        ended = sorted(self.buried, key=str)
        return (*held, *(InventoryEntry(key=key, state=SequenceState.DONE) for key in ended))

    def take(self) -> ReportTold | None:
        """Applies the next command; its answer."""
        command = self.inbox.popleft()
        self.seen = command.number
        key, body = command.key, command.body
        match body:
            case ReserveJob() | PrefillJob() if key in self.buried:
                return None  # late
            case ReserveJob():
                needed = self.num_blocks_at_start(body)
                if needed > self.free:
                    return self.report(key, ReserveRefusedTold(free_blocks=self.free))
                self.hold(key, needed)
                return self.report(key, ReservedTold(target=target(self), attach_ticket=b"t"))
            case PrefillJob():
                self.hold(key, -(-body.spec.num_prompt_tokens // 16))
                return None
            case AbortJob() | ReleaseJob():
                return self.report(key, ReleasedTold(blocks_freed=self.bury(key)))
            case _:
                assert_never(body)

    def num_blocks_at_start(self, body: ReserveJob) -> int:
        """As real decode reserves."""
        tokens = num_tokens_at_start(body.spec.num_prompt_tokens, len(body.delivered_ids))
        return self.facts().num_blocks_at_start(tokens, body.spec.max_total_tokens)


def target(worker: SimWorker) -> KvTarget:
    """Of a decode worker."""
    return KvTarget(
        worker_id=worker.ref.worker_id,
        address="a",
        incarnation=worker.ref.incarnation,
        transfer_id=TransferId(1),
        transports=(),
    )
