"""Requests and their outcomes, domain <-> wire. Total both ways; what the wire cannot mean raises INVALID_REQUEST."""

import math

from shared.codec.errors import detail_to_error, error_to_detail
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, RequestId, RequestKey, TokenId
from shared.domain.request import CancelReason, FinishReason, Outcome, RequestSpec, RequestState
from shared.domain.sampling import SamplingParams, TokenLogprobs
from shared.wire import common_pb2, scheduler_pb2

MAX_TIMEOUT_MS = 2**32 - 1  # 49 days

_FINISH_TO_WIRE = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_FINISH_FROM_WIRE = {wire: reason for reason, wire in _FINISH_TO_WIRE.items()}
_OUTCOME_TO_WIRE = {
    RequestState.FINISHED: scheduler_pb2.OUTCOME_KIND_FINISHED,
    RequestState.CANCELLED: scheduler_pb2.OUTCOME_KIND_CANCELLED,
    RequestState.FAILED: scheduler_pb2.OUTCOME_KIND_FAILED,
}
_OUTCOME_FROM_WIRE = {wire: state for state, wire in _OUTCOME_TO_WIRE.items()}


def key_to_wire(key: RequestKey) -> common_pb2.RequestKey:
    return common_pb2.RequestKey(request_id=key.request_id, attempt=key.attempt)


def key_from_wire(key: common_pb2.RequestKey) -> RequestKey:
    return RequestKey(RequestId(key.request_id), Attempt(key.attempt))


def spec_to_wire(spec: RequestSpec) -> common_pb2.RequestSpec:
    return common_pb2.RequestSpec(
        request_id=spec.request_id,
        prompt_ids=spec.prompt_ids,
        max_tokens=spec.max_tokens,
        sampling=_sampling_to_wire(spec.sampling),
        ignore_eos=spec.ignore_eos,
        has_stop_strings=spec.has_stop_strings,
        kv_salt=spec.kv_salt,
    )


def spec_from_wire(spec: common_pb2.RequestSpec) -> RequestSpec:
    try:
        return RequestSpec(
            request_id=RequestId(spec.request_id),
            prompt_ids=tuple(map(TokenId, spec.prompt_ids)),
            max_tokens=spec.max_tokens,
            sampling=_sampling_from_wire(spec.sampling),
            ignore_eos=spec.ignore_eos,
            has_stop_strings=spec.has_stop_strings,
            kv_salt=spec.kv_salt,
        )
    except ValueError as error:
        raise ServingError(ErrorCode.INVALID_REQUEST, f"request spec: {error}") from error


def timeout_to_wire(deadline: float | None, now: float) -> int:
    """What is left in milliseconds, at least 1; 0 = no deadline."""
    return 0 if deadline is None else min(max(math.ceil((deadline - now) * 1000), 1), MAX_TIMEOUT_MS)


def deadline_from_wire(timeout_ms: int, now: float) -> float | None:
    """By the clock of `now`; None = no deadline."""
    return now + timeout_ms / 1000 if timeout_ms else None


def _sampling_to_wire(sampling: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        top_logprobs=sampling.top_logprobs,
    )


def _sampling_from_wire(sampling: common_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=tuple(sorted((TokenId(token_id), bias) for token_id, bias in sampling.logit_bias.items())),
        min_tokens=sampling.min_tokens,
        stop_token_ids=tuple(map(TokenId, sampling.stop_token_ids)),
        top_logprobs=sampling.top_logprobs if sampling.HasField("top_logprobs") else None,
    )


def logprobs_to_wire(logprobs: TokenLogprobs) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_ids=[token_id for token_id, _ in logprobs.top],
        top_logprobs=[logprob for _, logprob in logprobs.top],
    )


def logprobs_from_wire(logprobs: common_pb2.TokenLogprobs) -> TokenLogprobs:
    top = zip(map(TokenId, logprobs.top_ids), logprobs.top_logprobs, strict=True)
    return TokenLogprobs(logprob=logprobs.logprob, top=tuple(top))


def finish_reason_to_wire(reason: FinishReason | None) -> "common_pb2.FinishReason.ValueType":
    return common_pb2.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH_TO_WIRE[reason]


def finish_reason_from_wire(reason: "common_pb2.FinishReason.ValueType") -> FinishReason | None:
    """None where the wire says nothing."""
    return _FINISH_FROM_WIRE.get(reason)


def cancel_reason_from_wire(text: str, default: CancelReason) -> CancelReason:
    """A reason of a newer gateway is taken for the default: the cancel matters, not its name."""
    try:
        return CancelReason(text)
    except ValueError:
        return default


def outcome_state_from_wire(kind: "scheduler_pb2.OutcomeKind.ValueType") -> RequestState | None:
    """None where the wire says nothing."""
    return _OUTCOME_FROM_WIRE.get(kind)


def outcome_to_wire(outcome: Outcome) -> scheduler_pb2.Outcome:
    return scheduler_pb2.Outcome(
        kind=_OUTCOME_TO_WIRE[outcome.state],
        finish_reason=finish_reason_to_wire(outcome.finish_reason),
        error=None if outcome.error is None else error_to_detail(outcome.error),
        blocks_freed=outcome.blocks_freed,
    )


def outcome_from_wire(outcome: scheduler_pb2.Outcome) -> Outcome:
    state = _OUTCOME_FROM_WIRE.get(outcome.kind)
    if state is None:
        raise ServingError(ErrorCode.INTERNAL, "outcome without a kind")
    return Outcome(
        state=state,
        finish_reason=finish_reason_from_wire(outcome.finish_reason),
        error=detail_to_error(outcome.error) if outcome.HasField("error") else None,
        blocks_freed=outcome.blocks_freed,
    )
