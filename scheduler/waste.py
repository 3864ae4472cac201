"""Work done in vain: what a worker computed for an attempt and no answer is made of. Pure.

Counted when the worker lets go of the attempt. A worker that is lost and comes back says then what it had done; of one
that does not, what it had reported counts: whole prompts. Tokens that it had sent are the client's, and feeding them
again elsewhere counts there.
"""

from dataclasses import dataclass
from enum import StrEnum

from shared.domain.errors import ErrorCode
from shared.domain.ids import Attempt
from shared.domain.lifecycle import RequestRecord
from shared.domain.request import RequestState, Role
from shared.domain.worker import Work


class WasteCause(StrEnum):
    """Why."""

    CANCELLED = "cancelled"
    SLOW_CLIENT = "slow_client"
    DEADLINE = "deadline"
    FAILED = "failed"
    REQUEUED = "requeued"
    """The attempt was closed and another followed: lost workers, failed transfers, preemptions."""
    OVERRUN = "overrun"
    """Tokens behind the end of the answer, which the gateway found (a stop string)."""
    ORPHANED = "orphaned"
    """For a request that this scheduler does not know."""


class WasteStage(StrEnum):
    """On what."""

    PREFILL = "prefill"
    DECODE = "decode"
    REPLAY = "replay"
    """Output tokens of earlier attempts, fed again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """Tokens computed in vain; at least 1."""

    cause: WasteCause
    stage: WasteStage
    num_tokens: int


def wasted(record: RequestRecord | None, attempt: Attempt, role: Role, work: Work) -> tuple[Waste, ...]:
    """What of a released attempt's work was in vain. `record` is the request's, None where it is not known.

    Of a request that was cancelled or failed all is, though its reader may have seen some. Of a closed attempt the
    prompt is, for its KV is lost, and what no gateway was sent. A replay always is: it is done only because an
    earlier attempt was closed.
    """
    is_prefill = role is Role.PREFILL
    cause = _cause(record, attempt)
    is_answer_used = cause in (WasteCause.REQUEUED, WasteCause.OVERRUN)
    num_tokens = work.undelivered_tokens if is_answer_used and not is_prefill else work.computed_tokens
    if cause is WasteCause.OVERRUN and is_prefill:
        num_tokens = 0
    stage = WasteStage.PREFILL if is_prefill else WasteStage.DECODE
    found = (
        Waste(cause=cause, stage=stage, num_tokens=num_tokens),
        Waste(cause=WasteCause.REQUEUED, stage=WasteStage.REPLAY, num_tokens=work.replayed_tokens),
    )
    return tuple(each for each in found if each.num_tokens)


def _cause(record: RequestRecord | None, attempt: Attempt) -> WasteCause:
    if record is None:
        return WasteCause.ORPHANED
    if attempt != record.attempt:
        return WasteCause.REQUEUED
    outcome = record.outcome
    if outcome is None or outcome.state is RequestState.FINISHED:
        return WasteCause.OVERRUN
    match None if outcome.error is None else outcome.error.code:
        case ErrorCode.CANCELLED:
            return WasteCause.CANCELLED
        case ErrorCode.SLOW_CLIENT:
            return WasteCause.SLOW_CLIENT
        case ErrorCode.DEADLINE_EXCEEDED:
            return WasteCause.DEADLINE
        case _:
            return WasteCause.FAILED
