"""The one error table."""

from http import HTTPStatus

import grpc
import pytest

from shared.domain.errors import ERROR_TABLE, ErrorCode, ServingError, openai_error


def test_the_table_is_total() -> None:
    """Every code has exactly one row."""

    assert set(ErrorCode) == set(ERROR_TABLE)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_row_has_faces_that_exist(code: ErrorCode) -> None:
    """gRPC and HTTP know the status of each row; 499 is the one status that only logs use."""
    row = ERROR_TABLE[code]

    assert row.grpc_status in grpc.StatusCode.__members__
    assert row.http_status == 499 or HTTPStatus(row.http_status).value >= 400
    assert row.openai_type.endswith("_error")


def test_openai_codes_are_unique() -> None:
    """A client can tell every failure apart by its code."""
    codes = [row.openai_code for row in ERROR_TABLE.values()]

    assert sorted(set(codes)) == sorted(codes)


@pytest.mark.parametrize("code", [code for code, row in ERROR_TABLE.items() if row.http_status in (429, 503)])
def test_what_asks_to_come_back_says_when(code: ErrorCode) -> None:
    """429 and admission's 503 carry a Retry-After; failures of running work (server_error) do not."""
    row = ERROR_TABLE[code]

    assert (row.openai_type == "server_error") == (ServingError(code, "x").retry_after_s is None)


def test_the_openai_object_holds_message_type_param_and_code() -> None:
    """The same object goes into an HTTP body and into a stream."""
    error = ServingError(ErrorCode.INVALID_REQUEST, "top_p must be above 0", param="top_p")

    assert {
        "error": {
            "message": "top_p must be above 0",
            "type": "invalid_request_error",
            "param": "top_p",
            "code": "invalid_value",
        }
    } == openai_error(error)


def test_errors_compare_by_value() -> None:
    """Two errors with the same fields are equal and hash alike; another field makes another error."""
    one = ServingError(ErrorCode.OVERLOADED, "queue full", retry_after_s=3)

    assert one == ServingError(ErrorCode.OVERLOADED, "queue full", retry_after_s=3)
    assert len({one, ServingError(ErrorCode.OVERLOADED, "queue full", retry_after_s=3)}) == 1
    assert one != ServingError(ErrorCode.OVERLOADED, "queue full", retry_after_s=4)
    assert one != "queue full"
    assert str(one) == "OVERLOADED: queue full"
