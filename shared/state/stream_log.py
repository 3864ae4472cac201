"""The log of a resumable answer in Redis: question, delivered tokens, end. Written by one gateway session at a time.

Each new reader takes the log over and so raises the session number; what an older session writes is refused by the same
scripts. The log of a request without `resumable` does not exist.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from shared.codec.request import (
    logprobs_from_wire,
    logprobs_to_wire,
    outcome_from_wire,
    outcome_to_wire,
    spec_from_wire,
    spec_to_wire,
)
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, RequestId, TokenId
from shared.domain.request import Outcome, RequestSpec
from shared.domain.sampling import TokenLogprobs
from shared.obs.logs import get_logger
from shared.state.client import Script, StateClient
from shared.state.keys import ENDED_LOG_TTL_MS, LIVE_LOG_TTL_MS, log_key
from shared.wire import common_pb2, decode_pb2, scheduler_pb2

FIRST_SESSION = 1

_WRITE = Script("write_stream_log")
_APPEND = Script("append_stream_log")
_END = Script("end_stream_log")
_TAKE_OVER = Script("take_over_stream_log")
_log = get_logger("state")


class LogMissing(Exception):
    """The stored log does not end where ours does: Redis lost it, or has an older state. Write the whole again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHead:
    """What was asked. `served` is the gateway's own: how the answer is shown."""

    spec: RequestSpec
    key_hash: str
    served: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedTokens:
    """Consecutive output tokens, the first of them numbered `first_index`, of one attempt."""

    first_index: int
    ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One a token, or none at all."""
    attempt: Attempt
    cached_tokens: int = 0
    """Means something with token 1."""

    @property
    def last_index(self) -> int:
        return self.first_index + len(self.ids) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedAnswer:
    """A log as its new reader found it. `session` is the reader's own number, 0 where the answer has ended."""

    session: int
    head: LogHead
    tokens: LoggedTokens
    """All of them, from 1 on; `attempt` is the last one's."""
    outcome: Outcome | None


class StreamLog:
    """Every method raises STATE_UNAVAILABLE when Redis is away, every write SUPERSEDED when a newer session has it."""

    def __init__(self, client: StateClient) -> None:
        self._client = client

    async def write(self, head: LogHead, session: int, tokens: LoggedTokens) -> None:
        """The whole log, in the place of whatever an older or the same session has left."""
        await self._run(
            _WRITE,
            head.spec.request_id,
            session,
            LIVE_LOG_TTL_MS,
            head.key_hash,
            spec_to_wire(head.spec).SerializeToString(),
            head.served,
            tokens.last_index,
            _to_bytes(tokens) if tokens.ids else b"",
        )

    async def append(self, request_id: RequestId, session: int, tokens: LoggedTokens) -> None:
        """Again does no harm. Raises LogMissing."""
        await self._run(
            _APPEND,
            request_id,
            session,
            LIVE_LOG_TTL_MS,
            tokens.first_index,
            tokens.last_index,
            _to_bytes(tokens),
        )

    async def end(self, request_id: RequestId, session: int, num_tokens: int, outcome: Outcome) -> None:
        """It goes after ten minutes; an end that is there already stands. Raises LogMissing."""
        data = outcome_to_wire(outcome).SerializeToString()
        await self._run(_END, request_id, session, ENDED_LOG_TTL_MS, num_tokens, data)

    async def take_over(self, request_id: RequestId, key_hash: str) -> LoggedAnswer | None:
        """For a new reader. None where there is no log that this key may read."""
        # Asked first: a store that stands still would take the answer from its reader when it wakes, for nobody.
        if not await self._client.call("EXISTS", log_key(request_id)):
            return None
        reply = await self._client.run(_TAKE_OVER, [log_key(request_id)], [key_hash, LIVE_LOG_TTL_MS])
        if not reply:
            return None
        session, entries = reply
        try:
            return _from_entries(session, [_fields(entry[1]) for entry in entries])
        except (KeyError, ValueError, ServingError, DecodeError):  # of another version: nobody can go on with it
            _log.warning("unreadable stream log", request_id=request_id)
            return None

    async def _run(self, script: Script, request_id: RequestId, *args: str | int | bytes) -> None:
        match await self._client.run(script, [log_key(request_id)], args):
            case b"ok":
                pass
            case b"superseded":
                raise superseded()
            case _:
                raise LogMissing


def superseded() -> ServingError:
    """What the older of two readers is told."""
    return ServingError(ErrorCode.SUPERSEDED, "a newer reader took over")


def _to_bytes(tokens: LoggedTokens) -> bytes:
    return decode_pb2.SequenceTokens(
        key=common_pb2.RequestKey(attempt=tokens.attempt),
        first_index=tokens.first_index,
        ids=tokens.ids,
        cached_tokens=tokens.cached_tokens,
        logprobs=map(logprobs_to_wire, tokens.logprobs),
    ).SerializeToString()


def _fields(flat: Sequence[bytes]) -> dict[str, bytes]:
    return {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}


def _from_entries(session: int, entries: Sequence[dict[str, bytes]]) -> LoggedAnswer:
    """Raises KeyError, ValueError or ServingError where it is not what was written."""
    head = entries[0]
    ids: list[TokenId] = []
    logprobs: list[TokenLogprobs] = []
    attempt, cached_tokens, outcome = Attempt(0), 0, None
    for entry in entries:
        if "tokens" in entry:
            part = decode_pb2.SequenceTokens.FromString(entry["tokens"])
            if part.first_index != len(ids) + 1:
                raise ValueError("tokens are missing")
            if part.first_index == 1:
                cached_tokens = part.cached_tokens
            ids.extend(map(TokenId, part.ids))
            logprobs.extend(map(logprobs_from_wire, part.logprobs))
            attempt = Attempt(part.key.attempt)
        elif "outcome" in entry:
            outcome = outcome_from_wire(scheduler_pb2.Outcome.FromString(entry["outcome"]))
    return LoggedAnswer(
        session=session,
        head=LogHead(
            spec=spec_from_wire(common_pb2.RequestSpec.FromString(head["spec"])),
            key_hash=head["key"].decode(),
            served=head["served"],
        ),
        tokens=LoggedTokens(
            first_index=1, ids=tuple(ids), logprobs=tuple(logprobs), attempt=attempt, cached_tokens=cached_tokens
        ),
        outcome=outcome,
    )
