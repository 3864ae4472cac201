"""The records of requests in Redis: three writes a request, fenced by epoch. No prompt, token or text."""

from typing import cast

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Epoch, Incarnation, RequestId, WorkerId
from shared.domain.request import FinishReason, RequestState, StoredRequest
from shared.obs.logs import get_logger
from shared.state.client import Script, StateClient
from shared.state.keys import (
    ENDED_REQUEST_TTL_MS,
    KEY_HASH_FIELD,
    LIVE_REQUEST_TTL_MS,
    REQUEST_PATTERN,
    request_id_of,
    request_key,
)

_STORE = Script("store_request", request_key)
_log = get_logger("state")


class NewerEpoch(ServingError):
    """A scheduler of a higher epoch has written the record: who is told so is the active one no more."""


class RequestStore:
    """Written by the active scheduler only.

    Every method raises ServingError STATE_UNAVAILABLE when Redis is away. Every write raises STALE_ATTEMPT when a
    higher epoch (then it is a NewerEpoch) or attempt has written the record, or when the request has ended already.
    """

    def __init__(self, client: StateClient) -> None:
        self._client = client

    async def admit(self, stored: StoredRequest) -> None:
        """First write: before the client is told that it is queued."""
        await self._store(stored)

    async def place(self, stored: StoredRequest) -> None:
        """Second write: attempt and both workers, before Reserve is sent."""
        await self._store(stored)

    async def finish(self, stored: StoredRequest) -> None:
        """Third write: the outcome. The record goes after ten minutes; an outcome that is there already stands."""
        if not stored.state.is_terminal:
            raise ValueError(f"{stored.state} is not an end")
        await self._store(stored)

    async def rewrite(self, stored: StoredRequest) -> None:
        """After Redis came back, perhaps empty: the record as the scheduler knows it now."""
        await self._store(stored)

    async def load(self, request_id: RequestId) -> StoredRequest | None:
        """None if there is no such record, or none that can be read."""
        return _from_fields(request_id, await self._client.call("HGETALL", request_key(request_id)))

    async def load_live(self) -> list[StoredRequest]:
        """Every record that has not ended, oldest admission first."""
        keys = {key async for key in self._client.scan(REQUEST_PATTERN, "hash")}
        found = [await self.load(request_id_of(key)) for key in keys]
        live = [stored for stored in found if stored is not None and not stored.state.is_terminal]
        return sorted(live, key=lambda stored: (stored.admitted_unix_ms, stored.request_id))

    async def _store(self, stored: StoredRequest) -> None:
        is_end = stored.state.is_terminal
        ttl_ms = ENDED_REQUEST_TTL_MS if is_end else LIVE_REQUEST_TTL_MS
        fields = [part for field in _to_fields(stored).items() for part in field]
        reply = await self._client.run(
            _STORE,
            [stored.epoch, stored.attempt, int(is_end), ttl_ms, *fields],
            request_id=stored.request_id,
        )
        if reply == b"newer":
            raise NewerEpoch(ErrorCode.STALE_ATTEMPT, "the record is a newer scheduler's")
        if reply != b"ok":
            raise ServingError(ErrorCode.STALE_ATTEMPT, f"the record was refused: {reply.decode()}")


def _to_fields(stored: StoredRequest) -> dict[str, str]:
    return {
        "state": stored.state.value,
        "attempt": str(stored.attempt),
        "epoch": str(stored.epoch),
        "gateway_incarnation": str(stored.gateway_incarnation),
        "admitted_unix_ms": str(stored.admitted_unix_ms),
        "seed": str(stored.seed),
        "prefill_worker": stored.prefill_worker or "",
        "decode_worker": stored.decode_worker or "",
        "finish_reason": stored.finish_reason or "",
        "error_code": stored.error_code or "",
        "completion_tokens": str(stored.completion_tokens),
        "session": str(stored.session),
        KEY_HASH_FIELD: stored.key_hash,
    }


def _from_fields(request_id: RequestId, flat: list[bytes]) -> StoredRequest | None:
    fields = {flat[i].decode(): flat[i + 1].decode() for i in range(0, len(flat), 2)}
    if not fields:
        return None
    try:
        return StoredRequest(
            request_id=request_id,
            state=RequestState(fields["state"]),
            attempt=Attempt(int(fields["attempt"])),
            epoch=Epoch(int(fields["epoch"])),
            gateway_incarnation=Incarnation(int(fields["gateway_incarnation"])),
            admitted_unix_ms=int(fields["admitted_unix_ms"]),
            seed=int(fields["seed"]),
            prefill_worker=cast(WorkerId | None, fields["prefill_worker"] or None),
            decode_worker=cast(WorkerId | None, fields["decode_worker"] or None),
            finish_reason=FinishReason(fields["finish_reason"]) if fields["finish_reason"] else None,
            error_code=fields["error_code"] or None,
            completion_tokens=int(fields["completion_tokens"]),
            session=int(fields.get("session", 0)),
            key_hash=fields.get(KEY_HASH_FIELD, ""),
        )
    except (KeyError, ValueError):  # of another version, or not ours: it cannot be adopted, and goes with its TTL
        _log.warning("unreadable record", request_id=request_id)
        return None
