"""The book of requests: every live record with the stream of its gateway, and the ends of a while ago.

Bookkeeping for `scheduler.core`, which alone decides. Ends are kept so that a gateway that comes back, or a repeated
cancel, gets its answer; the bound on their number is a bound on memory, not on correctness.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from scheduler.messages import StreamId
from shared.domain.ids import Epoch, RequestId, WorkerId
from shared.domain.lifecycle import RequestRecord
from shared.domain.request import RequestState, StoredRequest
from shared.domain.worker import WorkerRef


@dataclass(slots=True, kw_only=True, eq=False)
class Entry:
    """One request. Mutable; owned by the Ledger."""

    record: RequestRecord
    stream: StreamId | None
    stream_broken_at: float | None = None
    deadline: float | None = None
    """When the client's time is over; None = not known, or never."""
    session: int = 0
    """Highest that a gateway has named; above 0 the answer can be resumed, so its gateway is waited for longer."""
    key_hash: str = ""
    """Of the client's key: who may cancel it by its id."""
    is_written: bool = False
    """Admitted is in Redis: Queued has been told."""
    ended_at: float | None = None
    done_event: tuple[WorkerRef, int] | None = None
    """The SequenceDone that is acknowledged when the outcome is written or owed."""

    @property
    def request_id(self) -> RequestId:
        return self.record.request_id


class Ledger:
    """Owner of the entries."""

    def __init__(self, *, epoch: Epoch, ends_kept_s: float, max_ends_kept: int) -> None:
        self._epoch = epoch
        self._ends_kept_s = ends_kept_s
        self._max_ends_kept = max_ends_kept
        self._entries: dict[RequestId, Entry] = {}
        self._by_stream: dict[StreamId, Entry] = {}
        self._ends: dict[RequestId, None] = {}

    def add(self, entry: Entry) -> None:
        self._entries[entry.request_id] = entry
        if entry.stream is not None:
            self._by_stream[entry.stream] = entry

    def get(self, request_id: RequestId) -> Entry | None:
        return self._entries.get(request_id)

    def forget(self, entry: Entry) -> None:
        self.detach(entry)
        self._entries.pop(entry.request_id, None)
        self._ends.pop(entry.request_id, None)

    def attach(self, entry: Entry, stream: StreamId) -> StreamId | None:
        """Give the request a new stream; the one that it replaces, if any."""
        old = self.detach(entry)
        entry.stream = stream
        entry.stream_broken_at = None
        self._by_stream[stream] = entry
        return old

    def detach(self, entry: Entry) -> StreamId | None:
        old, entry.stream = entry.stream, None
        if old is not None:
            self._by_stream.pop(old, None)
        return old

    def by_stream(self, stream: StreamId) -> Entry | None:
        return self._by_stream.get(stream)

    def ended(self, entry: Entry, now: float) -> None:
        entry.ended_at = now
        self._ends[entry.request_id] = None

    def forget_old_ends(self, now: float) -> None:
        """Drop ends beyond the time or the number kept. One that still awaits releases stays."""
        surplus = len(self._ends) - self._max_ends_kept
        for request_id in tuple(self._ends):
            entry = self._entries[request_id]
            assert entry.ended_at is not None
            if surplus <= 0 and now - entry.ended_at < self._ends_kept_s:
                break  # in order of ending: the rest is younger
            if entry.record.is_settled and entry.done_event is None:
                self.forget(entry)
                surplus -= 1

    def __iter__(self) -> Iterator[Entry]:
        """Over a copy: taking out while iterating is fine."""
        return iter(tuple(self._entries.values()))

    def live(self) -> list[Entry]:
        """Requests that have not ended, oldest first."""
        return [entry for entry in self._entries.values() if not entry.record.state.is_terminal]

    def num_live(self) -> int:
        return len(self._entries) - len(self._ends)

    def num_by_state(self) -> dict[RequestState, int]:
        """Live requests by state, zeros included."""
        counts = {state: 0 for state in RequestState if not state.is_terminal}
        for entry in self.live():
            counts[entry.record.state] += 1
        return counts

    def num_unreleased(self) -> int:
        return sum(len(entry.record.unreleased) for entry in self._entries.values())

    def stored(self, entry: Entry) -> StoredRequest:
        """The part of a record that goes into Redis."""
        record = entry.record
        outcome = record.outcome if record.state.is_terminal else None
        return StoredRequest(
            request_id=record.request_id,
            state=record.state,
            attempt=record.attempt,
            epoch=self._epoch,
            gateway_incarnation=record.gateway_incarnation,
            admitted_unix_ms=record.admitted_unix_ms,
            seed=record.spec.sampling.seed,
            prefill_worker=_name(record.prefill),
            decode_worker=_name(record.decode),
            finish_reason=None if outcome is None else outcome.finish_reason,
            error_code=None if outcome is None or outcome.error is None else outcome.error.code.value,
            completion_tokens=record.completion_tokens,
            session=entry.session,
            key_hash=entry.key_hash,
        )


def _name(ref: WorkerRef | None) -> WorkerId | None:
    return None if ref is None else ref.worker_id
