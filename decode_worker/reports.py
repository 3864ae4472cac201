"""What the table tells of itself: to the scheduler in inventory and heartbeat, to the log at the end of an attempt."""

from collections.abc import Iterable, Mapping
from typing import Protocol

from decode_worker.sequence import HeldSequence
from shared.codec import worker_events
from shared.domain.ids import RequestKey
from shared.domain.request import SequenceState
from shared.engine.decode_runner import DecodeStep
from shared.obs.metrics import Metrics
from shared.wire import scheduler_pb2


class EventSink(Protocol):
    """The session with the scheduler, as far as the table needs it."""

    def post(self, event: scheduler_pb2.WorkerEvent) -> None: ...

    def heartbeat_soon(self) -> None: ...


def inventory(rows: Iterable[HeldSequence], ended: Iterable[RequestKey]) -> scheduler_pb2.Inventory:
    """Everything that is held, and the ends of the last 60 s."""
    held = [
        worker_events.inventory_entry(
            row.key,
            row.sequence_state,
            attach_ticket=row.attach_ticket,
            last_index=row.outbox.last_index if row.told_end is None else row.told_end.index,
            finish_reason=None if row.told_end is None else row.told_end.reason,
        )
        for row in rows
    ]
    return scheduler_pb2.Inventory(
        entries=[*held, *(worker_events.inventory_entry(key, SequenceState.DONE) for key in ended)]
    )


def sequence_counts(rows: Iterable[HeldSequence]) -> Mapping[str, int]:
    """State -> sequences, all states."""
    counts = {state.value: 0 for state in SequenceState}
    for row in rows:
        counts[row.sequence_state.value] += 1
    return counts


def count_step(metrics: Metrics, step: DecodeStep, rows: Mapping[RequestKey, HeldSequence]) -> None:
    """What a step has computed, for the metrics and with each row that took part."""
    if step.num_sequences:
        metrics.step_sequences.record(step.num_sequences)
        metrics.tokens_computed.add(len(step.tokens) + step.num_replayed)
        metrics.replayed_tokens.add(step.num_replayed)
    for key, num_tokens in step.replayed.items():
        rows[key].num_replayed += num_tokens
    for token in step.tokens:
        rows[token.key].num_computed += 1


def ended_fields(row: HeldSequence) -> dict[str, object]:
    """The one line that is logged of an attempt. No content."""
    end = row.outbox.end
    return {
        "request_id": row.key.request_id,
        "attempt": row.key.attempt,
        "outcome": _outcome(row),
        "code": row.error.code.value if row.error else None,
        "finish_reason": end.reason.value if end else None,
        "prompt_tokens": row.spec.num_prompt_tokens,
        "delivered_tokens": len(row.delivered),
        "output_tokens": row.outbox.last_index,
        "computed_tokens": row.num_computed,
        "replayed_tokens": row.num_replayed,
        "cached_tokens": row.cached_tokens,
        "tokens_held": row.tokens_held,
        "kv_bytes": row.kv_bytes,
        "blocks_freed": row.blocks_freed,
        **row.phases_ms(),
    }


def _outcome(row: HeldSequence) -> str:
    if row.is_preempted:
        return "preempted"
    if row.error is not None:
        return "failed"
    return "finished" if row.is_done_reported else "aborted"
