"""One attempt on the decode worker: its KV on the way in, its tokens on the way out. State, no decisions."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from decode_worker.outbox import Outbox, OutboxEnd
from decode_worker.reservations import Reservation
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Epoch, Incarnation, RequestKey, TokenId, TransferId
from shared.domain.request import FinishReason, RequestSpec, SequenceState
from shared.domain.worker import Work
from shared.engine.executor import SampledToken, finish_reason
from shared.kv.block_table import BlockTable
from shared.kv.frames import FrameReceiver, RejectCode
from shared.kv.layout import KvLayout


class Stage(StrEnum):
    """RECEIVING -> JOINING (committed, the engine checks) -> RUNNING -> ENDED; each may go to ENDED at once."""

    RECEIVING = "receiving"
    JOINING = "joining"
    RUNNING = "running"
    ENDED = "ended"


class TokenReader(Protocol):
    """The stream that a sequence's tokens go to."""

    def touch(self, sequence: "HeldSequence") -> None:
        """Something of it may be sent."""
        ...

    def flush(self, sequence: "HeldSequence") -> None:
        """Take now what is unsent: it goes out whatever becomes of the sequence."""
        ...


@dataclass(slots=True, kw_only=True)
class Moments:
    """Monotonic seconds, for the one line that is logged at the end; None = did not happen."""

    reserved_at: float
    first_token_at: float | None = None
    committed_at: float | None = None
    ended_at: float | None = None


@dataclass(slots=True, kw_only=True, eq=False)
class HeldSequence:
    """A row of the worker's table."""

    key: RequestKey
    spec: RequestSpec
    epoch: Epoch  # of the Reserve: what the events of this attempt answer
    transfer_id: TransferId
    attach_ticket: bytes
    block_table: BlockTable
    tokens_held: int  # of the prompt, whose KV was here before
    delivered: tuple[TokenId, ...]  # what the client has of a continued answer: replayed, not computed anew
    receiver: FrameReceiver
    outbox: Outbox
    moments: Moments
    unattended_since: float  # since when no gateway reads; means nothing while `reader` is set
    deadline: float | None = None  # when the client's time is over
    stage: Stage = Stage.RECEIVING
    is_in_engine: bool = False
    is_checked: bool = False  # the engine has found the prompt's KV good
    granted_upto: int = 0  # credit that the engine was told
    moved_at: float = 0.0  # last token made or acknowledged since the commit
    outputs: list[TokenId] = field(default_factory=list[TokenId])  # delivered ones included
    sender: Incarnation | None = None  # the first that opened the transfer or brought token 1
    first_token: SampledToken | None = None
    cached_tokens: int = 0
    num_computed: int = 0
    num_replayed: int = 0
    kv_bytes: int = 0
    reader: TokenReader | None = None
    session: int = 0  # highest that a gateway has named for a resumable answer
    next_unsent: int = 1
    is_end_sent: bool = False
    is_done_reported: bool = False
    error: ServingError | None = None
    is_preempted: bool = False  # its blocks go to others; it comes back as another attempt
    release_epoch: Epoch | None = None  # of the Abort or Release that waits for its answer
    blocks_freed: int = 0

    @property
    def reject_code(self) -> RejectCode:
        """Why no more KV is taken, once it is not."""
        return RejectCode.GONE if self.error is None else RejectCode.FAULT

    @property
    def sequence_state(self) -> SequenceState:
        """The word that other processes know."""
        if self.is_preempted:
            return SequenceState.PREEMPTED
        match self.stage:
            case Stage.RECEIVING | Stage.JOINING:
                return SequenceState.WAITING_KV
            case Stage.RUNNING:
                return SequenceState.PARKED if self.is_parked else SequenceState.RUNNING
            case Stage.ENDED:
                return SequenceState.DONE

    @property
    def is_parked(self) -> bool:
        """It holds blocks and computes nothing, because its reader takes nothing."""
        return self.stage is Stage.RUNNING and self.outbox.last_index >= self.granted_upto

    @property
    def is_broken_off(self) -> bool:
        """It has ended here without an answer: nobody reads it any more."""
        return self.error is not None or self.is_preempted

    @property
    def is_settled(self) -> bool:
        """Nothing touches its blocks any more."""
        return self.stage is Stage.ENDED and not self.is_in_engine and not self.receiver.is_copying

    @property
    def num_sent(self) -> int:
        """Of the tokens behind the delivered ones, those that have gone to a reader."""
        return max(self.outbox.acked_upto, self.next_unsent - 1) - len(self.delivered)

    @property
    def work(self) -> Work:
        """What was done for it here."""
        upto = max(self.outbox.acked_upto, self.next_unsent - 1)
        end = self.outbox.end
        delivered_upto = upto if end is None else min(upto, end.index)
        num_before = max(len(self.delivered), 1)  # token 1 came from prefill
        return Work(
            computed_tokens=self.num_computed,
            replayed_tokens=self.num_replayed,
            undelivered_tokens=max(0, self.num_computed - max(0, delivered_upto - num_before)),
        )

    @property
    def has_undelivered(self) -> bool:
        """Tokens, or the word that it ended, which no gateway has acknowledged."""
        return not self.outbox.is_done

    def take(self, index: int, token: SampledToken, finish: FinishReason | None) -> None:
        """Put a token into the outbox; with a `finish` it is the last. Raises ValueError where it is not the next."""
        self.outbox.append(index, token)
        self.outputs.append(token.token_id)
        if finish is not None:
            self.outbox.close(finish)

    def touch_reader(self) -> None:
        """Whoever reads it has news."""
        if self.reader is not None:
            self.reader.touch(self)

    def take_first(self, token: SampledToken, cached_tokens: int, eos_ids: frozenset[TokenId]) -> FinishReason | None:
        """Token 1, from prefill. Returns the reason where the answer ends with it."""
        finish = finish_reason(self.spec, index=1, token_id=token.token_id, eos_ids=eos_ids)
        self.first_token = token
        self.cached_tokens = cached_tokens
        self.take(1, token, finish)
        return finish

    def close_if_delivered(self, eos_ids: frozenset[TokenId]) -> bool:
        """True where the client had the whole answer already, and lacks only the word that it has ended."""
        if not self.delivered:
            return False
        index = len(self.delivered)
        finish = finish_reason(self.spec, index=index, token_id=self.delivered[-1], eos_ids=eos_ids)
        if finish is None:
            return False
        self.outbox.close(finish)
        return True

    def read_from(self, from_index: int, reader: TokenReader, session: int = 0) -> None:
        """The reader gets the tokens from there on, an earlier reader no more.

        Raises ServingError where they left, SUPERSEDED where a reader of a higher session came before.
        """
        if session < self.session:
            raise ServingError(ErrorCode.SUPERSEDED, "a newer reader took over")
        first_held = self.outbox.acked_upto + 1
        if self.outbox.is_done:
            from_index = max(from_index, first_held)
        elif not first_held <= from_index <= self.outbox.last_index + 1:
            raise ServingError(ErrorCode.INVALID_REQUEST, f"token {from_index} is not held: {first_held} is the first")
        self.session = session
        self.reader = reader
        self.next_unsent = from_index
        self.is_end_sent = False
        reader.touch(self)

    @property
    def told_end(self) -> OutboxEnd | None:
        """The end of an answer that is with its gateway, all of it, and of which the scheduler has been told."""
        return self.outbox.end if self.is_done_reported else None

    @property
    def computed_prefix(self) -> tuple[TokenId, ...]:
        """The tokens whose KV is there for certain: prompt, and output but for the last token, which was not fed."""
        return (*self.spec.prompt_ids, *self.outputs[:-1])

    def phases_ms(self) -> dict[str, int]:
        """Lengths of the phases that were reached.

        `receive`: Reserve to token 1; `transfer_exposed`: token 1 (right after the last prefill step) to the commit;
        `decode`: commit to the end.
        """
        moments = self.moments
        phases = {
            "receive_ms": (moments.reserved_at, moments.first_token_at),
            "transfer_exposed_ms": (moments.first_token_at, moments.committed_at),
            "decode_ms": (moments.committed_at, moments.ended_at),
            "total_ms": (moments.reserved_at, moments.ended_at),
        }
        return {
            name: round(max(end - start, 0.0) * 1000)
            for name, (start, end) in phases.items()
            if start is not None and end is not None
        }


def hold(
    spec: RequestSpec,
    granted: Reservation,
    *,
    delivered: tuple[TokenId, ...],
    epoch: Epoch,
    layout: KvLayout,
    incarnation: Incarnation,
    outbox: Outbox,
    deadline: float | None = None,
    now: float,
) -> HeldSequence:
    """The row of a new reservation. `incarnation` is this process's."""
    block_table = BlockTable(granted.blocks, layout.block_size)
    tokens_held = granted.num_shared * layout.block_size
    return HeldSequence(
        key=granted.key,
        spec=spec,
        epoch=epoch,
        transfer_id=granted.transfer_id,
        attach_ticket=granted.attach_ticket,
        block_table=block_table,
        tokens_held=tokens_held,
        delivered=delivered,
        outputs=list(delivered),
        next_unsent=len(delivered) + 1,
        receiver=FrameReceiver(
            layout=layout,
            key=granted.key,
            transfer_id=granted.transfer_id,
            receiver_incarnation=incarnation,
            num_prompt_tokens=spec.num_prompt_tokens,
            block_table=block_table,
            num_tokens_held=tokens_held,
        ),
        outbox=outbox,
        moments=Moments(reserved_at=now),
        deadline=deadline,
        unattended_since=now,
    )
