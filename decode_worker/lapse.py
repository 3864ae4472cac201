"""What time does to an attempt of which nobody speaks. Pure: the table does what is decided here."""

from enum import Enum

from decode_worker.growth import PARKED_S
from decode_worker.sequence import HeldSequence, Stage
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.lifecycle import deadline_exceeded

UNATTENDED_S = 45.0  # longer than a gateway's grace (5 s, 30 s when resumable) and its re-dialling together
DONE_KEPT_S = 60.0  # an ended answer whose Release never comes; as long as a tombstone


class Lapse(Enum):
    """PARKED: its blocks are wanted more by others. FORGOTTEN: ended, read to its end, and nobody asks for it."""

    PARKED = "parked"
    FORGOTTEN = "forgotten"


def lapsed(row: HeldSequence, now: float, *, has_lease: bool = True) -> Lapse | ServingError | None:
    """What has become of it by now; with an error it has failed. None = it goes on."""
    if row.release_epoch is not None or row.is_broken_off:
        return None  # it ends already
    if row.deadline is not None and now >= row.deadline and row.has_undelivered:
        return deadline_exceeded()
    if not has_lease and row.stage is Stage.RECEIVING:
        return ServingError(ErrorCode.KV_TRANSFER_FAILED, "no sign of the transfer")
    if row.is_parked and now - row.moved_at >= PARKED_S:
        return Lapse.PARKED
    if row.reader is not None or row.stage is Stage.RECEIVING:
        return None
    unattended_s = now - row.unattended_since
    if row.has_undelivered:
        return ServingError(ErrorCode.CANCELLED, "gateway_lost") if unattended_s >= UNATTENDED_S else None
    is_forgotten = row.is_done_reported and row.is_settled and unattended_s >= DONE_KEPT_S
    return Lapse.FORGOTTEN if is_forgotten else None
