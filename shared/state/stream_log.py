"""The log of a resumable answer in Redis: question, delivered tokens, end. Written by one gateway session at a time.

Each new reader takes the log over and so raises the session number; what an older session writes is refused by the same
scripts. The log of a request without `resumable` does not exist.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from shared.codec.logged import (
    outcome_from_bytes,
    outcome_to_bytes,
    spec_from_bytes,
    spec_to_bytes,
    tokens_from_bytes,
    tokens_to_bytes,
)
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, RequestId, TokenId
from shared.domain.logged import LoggedTokens, LogHead
from shared.domain.request import Outcome
from shared.domain.sampling import TokenLogprobs
from shared.obs.logs import get_logger
from shared.state.client import Reply, Script, StateClient, state_unavailable
from shared.state.keys import ENDED_LOG_TTL_MS, LIVE_LOG_TTL_MS, log_key

FIRST_SESSION = 1

_WRITE = Script("write_stream_log", log_key)
_APPEND = Script("append_stream_log", log_key)
_END = Script("end_stream_log", log_key)
_TAKE_OVER = Script("take_over_stream_log", log_key)
# Each has most of the time that a call has: more are needed only where a machine stands still between two calls.
_TAKE_OVER_TRIES = 3
_log = get_logger("state")


class LogMissing(Exception):
    """The stored log does not end where ours does: Redis lost it, or has an older state. Write the whole again."""


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
            spec_to_bytes(head.spec),
            head.served,
            head.deadline_unix_ms,
            tokens.last_index,
            tokens_to_bytes(tokens) if tokens.ids else b"",
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
            tokens_to_bytes(tokens),
        )

    async def end(self, request_id: RequestId, session: int, num_tokens: int, outcome: Outcome) -> None:
        """It goes after ten minutes; an end that is there already stands. Raises LogMissing."""
        data = outcome_to_bytes(outcome)
        await self._run(_END, request_id, session, ENDED_LOG_TTL_MS, num_tokens, data)

    async def take_over(self, request_id: RequestId, key_hash: str) -> LoggedAnswer | None:
        """For a new reader. None where there is no log that this key may read."""
        reply = await self._take_over(request_id, key_hash)
        if not reply:
            return None
        session, entries = reply
        try:
            return _from_entries(session, [_fields(entry[1]) for entry in entries])
        except (KeyError, ValueError, ServingError, DecodeError):  # of another version: nobody can go on with it
            _log.warning("unreadable stream log", request_id=request_id)
            return None

    async def _take_over(self, request_id: RequestId, key_hash: str) -> Reply:
        """Done in time or not at all. A store that stands still does what it is asked when it wakes: by then the caller
        has given up and asked again, perhaps elsewhere, and the answer would be taken from that reader for nobody.
        """
        for _ in range(_TAKE_OVER_TRIES):
            seconds, microseconds = await self._client.call("TIME")
            until_ms = int(seconds) * 1000 + int(microseconds) // 1000 + int(self._client.timeout_s * 900)
            reply = await self._client.run(_TAKE_OVER, [key_hash, LIVE_LOG_TTL_MS, until_ms], request_id=request_id)
            if reply != b"late":
                return reply
        raise state_unavailable()

    async def _run(self, script: Script, request_id: RequestId, *args: str | int | bytes) -> None:
        match await self._client.run(script, args, request_id=request_id):
            case b"ok":
                pass
            case b"superseded":
                raise superseded()
            case _:
                raise LogMissing


def superseded() -> ServingError:
    """What the older of two readers is told."""
    return ServingError(ErrorCode.SUPERSEDED, "a newer reader took over")


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
            part = tokens_from_bytes(entry["tokens"])
            if part.first_index != len(ids) + 1:
                raise ValueError("tokens are missing")
            if part.first_index == 1:
                cached_tokens = part.cached_tokens
            ids += part.ids
            logprobs += part.logprobs
            attempt = part.attempt
        elif "outcome" in entry:
            outcome = outcome_from_bytes(entry["outcome"])
    return LoggedAnswer(
        session=session,
        head=LogHead(
            spec=spec_from_bytes(head["spec"]),
            key_hash=head["key"].decode(),
            served=head["served"],
            deadline_unix_ms=int(head.get("deadline", 0)),
        ),
        tokens=LoggedTokens(
            first_index=1, ids=tuple(ids), logprobs=tuple(logprobs), attempt=attempt, cached_tokens=cached_tokens
        ),
        outcome=outcome,
    )
