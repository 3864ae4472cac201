"""Parts of a resumable answer's log, domain <-> bytes. What is not theirs raises ServingError or DecodeError."""

from shared.codec.request import (
    logprobs_from_wire,
    logprobs_to_wire,
    outcome_from_wire,
    outcome_to_wire,
    spec_from_wire,
    spec_to_wire,
)
from shared.domain.ids import Attempt, TokenId
from shared.domain.logged import LoggedTokens
from shared.domain.request import Outcome, RequestSpec
from shared.wire import common_pb2, decode_pb2, scheduler_pb2


def spec_to_bytes(spec: RequestSpec) -> bytes:
    return spec_to_wire(spec).SerializeToString()


def spec_from_bytes(data: bytes) -> RequestSpec:
    return spec_from_wire(common_pb2.RequestSpec.FromString(data))


def outcome_to_bytes(outcome: Outcome) -> bytes:
    return outcome_to_wire(outcome).SerializeToString()


def outcome_from_bytes(data: bytes) -> Outcome:
    return outcome_from_wire(scheduler_pb2.Outcome.FromString(data))


def tokens_to_bytes(tokens: LoggedTokens) -> bytes:
    return decode_pb2.SequenceTokens(
        key=common_pb2.RequestKey(attempt=tokens.attempt),
        first_index=tokens.first_index,
        ids=tokens.ids,
        cached_tokens=tokens.cached_tokens,
        logprobs=map(logprobs_to_wire, tokens.logprobs),
    ).SerializeToString()


def tokens_from_bytes(data: bytes) -> LoggedTokens:
    part = decode_pb2.SequenceTokens.FromString(data)
    return LoggedTokens(
        first_index=part.first_index,
        ids=tuple(map(TokenId, part.ids)),
        logprobs=tuple(map(logprobs_from_wire, part.logprobs)),
        attempt=Attempt(part.key.attempt),
        cached_tokens=part.cached_tokens,
    )
