"""Names of requests: our own ULIDs and what a client may call its request."""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestId

COMPLETION_PREFIX = "chatcmpl-"
MAX_CLIENT_ID_CHARS = 128  # echoed in a header and logged: long enough for any UUID or trace id
_CROCKFORD = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_ULID_CHARS = 26


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A request's own id and, for echo and log alone, the client's `X-Request-Id`."""

    request_id: RequestId
    client_request_id: str | None

    @property
    def completion_id(self) -> str:
        """What the answer calls itself; the answers to one question (n > 1) share it."""
        return COMPLETION_PREFIX + self.request_id.partition(".")[0]

    def child(self, choice: int) -> "Identity":
        """Of one answer of several."""
        return replace(self, request_id=child_id(self.request_id, choice))

    @property
    def headers(self) -> dict[str, str]:
        return {
            "x-firsttoken-request": self.request_id,
            "x-request-id": self.client_request_id or self.request_id,
        }


def new_identity(headers: Mapping[str, str], unix_ms: int) -> Identity:
    """For a request with these headers."""
    return Identity(
        request_id=new_request_id(unix_ms), client_request_id=_clean_client_id(headers.get("x-request-id", ""))
    )


def new_request_id(unix_ms: int) -> RequestId:
    """A ULID: 48 bits of time, 80 random ones, sortable as text."""
    number = unix_ms << 80 | secrets.randbits(80)
    return RequestId("".join(_CROCKFORD[number >> shift & 31] for shift in range(125, -1, -5)))


def key_hash(headers: Mapping[str, str]) -> str:
    """Whose request it is: what the client authorizes itself with, hashed; equal for all without."""
    return blake2b(headers.get("authorization", "").encode(), digest_size=16).hexdigest()


def child_id(request_id: RequestId, choice: int) -> RequestId:
    """Of answer `choice` (from 0) of several to one question."""
    return RequestId(f"{request_id}.{choice}")


def parse_request_id(text: str) -> RequestId:
    """With or without its prefix. Raises INVALID_REQUEST for an empty one; what cannot be an id is unknown."""
    bare = text.removeprefix(COMPLETION_PREFIX)
    if not bare:
        raise ServingError(ErrorCode.INVALID_REQUEST, "the request id is empty", param="id")
    if len(bare) != _ULID_CHARS or not set(bare) <= set(_CROCKFORD):
        raise unknown_request()
    return RequestId(bare)


def unknown_request() -> ServingError:
    """For a request that is not, or no longer, there."""
    return ServingError(ErrorCode.REQUEST_NOT_FOUND, "no such request", param="id")


def _clean_client_id(text: str) -> str | None:
    """Visible ASCII only, cut to its bound: it goes back into a header."""
    return "".join(char for char in text if "!" <= char <= "~")[:MAX_CLIENT_ID_CHARS] or None
