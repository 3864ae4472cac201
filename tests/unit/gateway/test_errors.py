"""Every code has a face in HTTP."""

import json

import pytest

from gateway.errors import error_body, error_headers, http_status
from shared.domain.errors import ErrorCode, ServingError


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_a_status_that_may_leave(code: ErrorCode) -> None:
    """A real client or server error, and never 499, which is for logs."""
    status = http_status(ServingError(code, "m"))

    assert 400 <= status < 600
    assert 499 != status


def test_what_was_cancelled_is_gone() -> None:
    """410: clients do not ask again by themselves."""
    assert 410 == http_status(ServingError(ErrorCode.CANCELLED, "cancelled"))


def test_a_refusal_that_passes_says_when_to_come_back() -> None:
    """Retry-After where the table has one, or the error its own; else none."""
    assert {"retry-after": "1"} == error_headers(ServingError(ErrorCode.OVERLOADED, "m"))
    assert {"retry-after": "7"} == error_headers(ServingError(ErrorCode.DRAINING, "m", retry_after_s=7))
    assert {} == error_headers(ServingError(ErrorCode.INVALID_REQUEST, "m"))


def test_after_408_the_connection_closes() -> None:
    """Half a request is still in it (RFC 9110 §15.5.9)."""
    assert {"connection": "close"} == error_headers(ServingError(ErrorCode.SLOW_CLIENT, "m"))


def test_the_body_is_openais_error_object() -> None:
    """All four keys, param null or the field."""
    error = ServingError(ErrorCode.INVALID_REQUEST, "m", param="stop")

    assert {
        "error": {"message": "m", "type": "invalid_request_error", "param": "stop", "code": "invalid_value"}
    } == json.loads(error_body(error))
