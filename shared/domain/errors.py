"""The one error table: every code's gRPC status, HTTP status, OpenAI type and code, and whether we retry.

`ServingError` is the only exception that crosses a module boundary on purpose. Everything else is a bug: logged with
its traceback, shown to a client as `internal_error` and nothing more.
"""

from dataclasses import dataclass
from enum import StrEnum


class ErrorCode(StrEnum):
    """Why a request was refused or failed."""

    INVALID_REQUEST = "INVALID_REQUEST"
    CONTEXT_TOO_LONG = "CONTEXT_TOO_LONG"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    MODEL_NOT_FOUND = "MODEL_NOT_FOUND"
    REQUEST_NOT_FOUND = "REQUEST_NOT_FOUND"
    NOT_FOUND = "NOT_FOUND"
    METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
    NOT_ACCEPTABLE = "NOT_ACCEPTABLE"
    RATE_LIMITED = "RATE_LIMITED"
    OVERLOADED = "OVERLOADED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    BODY_TOO_LARGE = "BODY_TOO_LARGE"
    NEVER_FITS = "NEVER_FITS"
    DEADLINE_UNREACHABLE = "DEADLINE_UNREACHABLE"
    SLOW_CLIENT = "SLOW_CLIENT"
    REQUEST_POISONED = "REQUEST_POISONED"
    NO_CAPACITY = "NO_CAPACITY"
    DRAINING = "DRAINING"
    WORKER_LOST = "WORKER_LOST"
    SUPERSEDED = "SUPERSEDED"
    KV_TRANSFER_FAILED = "KV_TRANSFER_FAILED"
    KV_CORRUPT = "KV_CORRUPT"
    STALE_ATTEMPT = "STALE_ATTEMPT"
    STATE_UNAVAILABLE = "STATE_UNAVAILABLE"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    INTERNAL = "INTERNAL"


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One row: the faces of a code. `grpc_status` is the name of a `grpc.StatusCode`; HTTP 499 never leaves a log."""

    grpc_status: str
    http_status: int
    openai_type: str
    openai_code: str
    is_retryable: bool
    default_retry_after_s: int | None = None


_INVALID = "invalid_request_error"
_RATE = "rate_limit_error"
_SERVER = "server_error"
_UNAVAILABLE = "service_unavailable_error"

ERROR_TABLE: dict[ErrorCode, ErrorRow] = {
    ErrorCode.INVALID_REQUEST: ErrorRow("INVALID_ARGUMENT", 400, _INVALID, "invalid_value", False),
    ErrorCode.CONTEXT_TOO_LONG: ErrorRow("OUT_OF_RANGE", 400, _INVALID, "context_length_exceeded", False),
    ErrorCode.UNAUTHENTICATED: ErrorRow("UNAUTHENTICATED", 401, "authentication_error", "invalid_api_key", False),
    ErrorCode.MODEL_NOT_FOUND: ErrorRow("NOT_FOUND", 404, _INVALID, "model_not_found", False),
    ErrorCode.REQUEST_NOT_FOUND: ErrorRow("NOT_FOUND", 404, _INVALID, "request_not_found", False),
    # The three HTTP-only rows: an unknown path, a known path with another method, an Accept that we cannot give.
    ErrorCode.NOT_FOUND: ErrorRow("NOT_FOUND", 404, _INVALID, "not_found", False),
    ErrorCode.METHOD_NOT_ALLOWED: ErrorRow("UNIMPLEMENTED", 405, _INVALID, "method_not_allowed", False),
    ErrorCode.NOT_ACCEPTABLE: ErrorRow("INVALID_ARGUMENT", 406, _INVALID, "not_acceptable", False),
    ErrorCode.RATE_LIMITED: ErrorRow("RESOURCE_EXHAUSTED", 429, _RATE, "rate_limit_exceeded", False, 1),
    ErrorCode.OVERLOADED: ErrorRow("RESOURCE_EXHAUSTED", 429, _RATE, "overloaded", False, 1),
    ErrorCode.PERMISSION_DENIED: ErrorRow("PERMISSION_DENIED", 403, "permission_error", "permission_denied", False),
    ErrorCode.BODY_TOO_LARGE: ErrorRow("RESOURCE_EXHAUSTED", 413, _INVALID, "body_too_large", False),
    ErrorCode.NEVER_FITS: ErrorRow("OUT_OF_RANGE", 400, _INVALID, "exceeds_kv_capacity", False),
    ErrorCode.DEADLINE_UNREACHABLE: ErrorRow("RESOURCE_EXHAUSTED", 429, _RATE, "deadline_unreachable", False, 1),
    ErrorCode.SLOW_CLIENT: ErrorRow("CANCELLED", 408, _SERVER, "slow_client", False),
    ErrorCode.REQUEST_POISONED: ErrorRow("INTERNAL", 500, _SERVER, "request_poisoned", False),
    ErrorCode.NO_CAPACITY: ErrorRow("UNAVAILABLE", 503, _UNAVAILABLE, "no_capacity", True, 1),
    ErrorCode.DRAINING: ErrorRow("UNAVAILABLE", 503, _UNAVAILABLE, "draining", True, 1),
    ErrorCode.WORKER_LOST: ErrorRow("UNAVAILABLE", 503, _SERVER, "worker_lost", True),
    ErrorCode.SUPERSEDED: ErrorRow("ABORTED", 409, _SERVER, "superseded", False),
    ErrorCode.KV_TRANSFER_FAILED: ErrorRow("UNAVAILABLE", 503, _SERVER, "kv_transfer_failed", True),
    ErrorCode.KV_CORRUPT: ErrorRow("DATA_LOSS", 500, _SERVER, "kv_corrupt", True),
    ErrorCode.STALE_ATTEMPT: ErrorRow("ABORTED", 500, _SERVER, "stale_attempt", False),
    ErrorCode.STATE_UNAVAILABLE: ErrorRow("UNAVAILABLE", 503, _UNAVAILABLE, "state_unavailable", False, 1),
    ErrorCode.DEADLINE_EXCEEDED: ErrorRow("DEADLINE_EXCEEDED", 504, _SERVER, "timeout", False),
    ErrorCode.CANCELLED: ErrorRow("CANCELLED", 499, _SERVER, "cancelled", False),
    ErrorCode.INTERNAL: ErrorRow("INTERNAL", 500, _SERVER, "internal_error", False),
}


class ServingError(Exception):
    """A failure with a code of the table and a message that is fit for a client.

    Only INVALID_REQUEST, CONTEXT_TOO_LONG and MODEL_NOT_FOUND (at most 64 characters) may carry text that came from a
    client.
    """

    def __init__(
        self, code: ErrorCode, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s if retry_after_s is not None else ERROR_TABLE[code].default_retry_after_s

    @property
    def row(self) -> ErrorRow:
        return ERROR_TABLE[self.code]

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ServingError):
            return NotImplemented
        return (self.code, self.message, self.param, self.retry_after_s) == (
            other.code,
            other.message,
            other.param,
            other.retry_after_s,
        )

    def __hash__(self) -> int:
        return hash((self.code, self.message, self.param, self.retry_after_s))


def openai_error(error: ServingError) -> dict[str, dict[str, str | None]]:
    """The OpenAI error object, the same in an HTTP body and in a stream."""
    row = error.row
    return {
        "error": {
            "message": error.message,
            "type": row.openai_type,
            "param": error.param,
            "code": row.openai_code,
        }
    }
