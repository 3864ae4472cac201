"""What a worker reports, domain -> wire: one function an event, which the session numbers, and what it holds."""

from shared.codec.errors import error_to_detail
from shared.codec.kv import target_to_wire
from shared.codec.request import finish_reason_to_wire, key_to_wire
from shared.domain.errors import ServingError
from shared.domain.ids import Epoch, RequestKey
from shared.domain.request import FinishReason, SequenceState
from shared.domain.worker import KvTarget, Work
from shared.wire import scheduler_pb2
from shared.wire.scheduler_pb2 import WorkerEvent


def reserved(key: RequestKey, epoch: Epoch, *, target: KvTarget, attach_ticket: bytes) -> WorkerEvent:
    """Decode holds the blocks; the target is for prefill, the ticket for the gateway."""
    told = scheduler_pb2.Reserved(target=target_to_wire(target), attach_ticket=attach_ticket)
    return WorkerEvent(key=key_to_wire(key), scheduler_epoch=epoch, reserved=told)


def reserve_refused(key: RequestKey, epoch: Epoch, *, needed_blocks: int, free_blocks: int) -> WorkerEvent:
    """Decode took nothing."""
    told = scheduler_pb2.ReserveRefused(needed_blocks=needed_blocks, free_blocks=free_blocks)
    return WorkerEvent(key=key_to_wire(key), scheduler_epoch=epoch, reserve_refused=told)


def prefill_done(key: RequestKey, epoch: Epoch, *, computed_tokens: int) -> WorkerEvent:
    """The last chunk is computed."""
    told = scheduler_pb2.PrefillDone(computed_tokens=computed_tokens)
    return WorkerEvent(key=key_to_wire(key), scheduler_epoch=epoch, prefill_done=told)


def kv_committed(key: RequestKey, epoch: Epoch, *, num_bytes: int) -> WorkerEvent:
    """Every block and token 1 are at decode, checked."""
    told = scheduler_pb2.KvCommitted(bytes=num_bytes)
    return WorkerEvent(key=key_to_wire(key), scheduler_epoch=epoch, kv_committed=told)


def sequence_done(key: RequestKey, epoch: Epoch, *, reason: FinishReason, completion_tokens: int) -> WorkerEvent:
    """The answer has ended and its outbox is empty."""
    told = scheduler_pb2.SequenceDone(finish_reason=finish_reason_to_wire(reason), completion_tokens=completion_tokens)
    return WorkerEvent(key=key_to_wire(key), scheduler_epoch=epoch, sequence_done=told)


def attempt_failed(key: RequestKey, epoch: Epoch, *, error: ServingError) -> WorkerEvent:
    """The attempt has ended here, with an error."""
    told = scheduler_pb2.AttemptFailed(error=error_to_detail(error))
    return WorkerEvent(key=key_to_wire(key), scheduler_epoch=epoch, attempt_failed=told)


def preempted(key: RequestKey, epoch: Epoch) -> WorkerEvent:
    """Its blocks go to others: the attempt has ended here, and the request goes on by requeue and replay."""
    return WorkerEvent(key=key_to_wire(key), scheduler_epoch=epoch, preempted=scheduler_pb2.Preempted())


def released(key: RequestKey, epoch: Epoch, *, blocks_freed: int, work: Work) -> WorkerEvent:
    """The answer to Abort and Release: nothing of the attempt is held here any more."""
    told = scheduler_pb2.Released(
        blocks_freed=blocks_freed,
        computed_tokens=work.computed_tokens,
        replayed_tokens=work.replayed_tokens,
        undelivered_tokens=work.undelivered_tokens,
    )
    return WorkerEvent(key=key_to_wire(key), scheduler_epoch=epoch, released=told)


def inventory_entry(
    key: RequestKey,
    state: SequenceState,
    *,
    attach_ticket: bytes = b"",
    last_index: int = 0,
    finish_reason: FinishReason | None = None,
) -> scheduler_pb2.InventoryEntry:
    """One attempt that the worker holds, or that ended in the last 60 s; with a finish_reason its end has been told."""
    entry = scheduler_pb2.InventoryEntry(
        key=key_to_wire(key), sequence_state=state.value, attach_ticket=attach_ticket, last_index=last_index
    )
    if finish_reason is not None:
        entry.finish_reason = finish_reason_to_wire(finish_reason)
    return entry
