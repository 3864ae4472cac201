import grpc
import grpc.aio
import pytest

from shared.domain.errors import ErrorCode, ServingError
from shared.rpc.errors import ERROR_METADATA_KEY, serving_error, status_of


def failed_call(code: grpc.StatusCode, details: str = "", detail: bytes | None = None) -> grpc.aio.AioRpcError:
    """What a stub raises."""
    trailing = grpc.aio.Metadata() if detail is None else grpc.aio.Metadata((ERROR_METADATA_KEY, detail))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=details)


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_has_a_status(code: ErrorCode) -> None:
    """The table names a status that grpc knows."""
    assert ServingError(code, "x").row.grpc_status == status_of(ServingError(code, "x")).name


@pytest.mark.parametrize("status", list(grpc.StatusCode))
def test_every_bare_status_means_something(status: grpc.StatusCode) -> None:
    """Without our detail the status alone decides; nothing raises."""
    expected = {
        grpc.StatusCode.UNAVAILABLE: ErrorCode.NO_CAPACITY,
        grpc.StatusCode.DEADLINE_EXCEEDED: ErrorCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED: ErrorCode.CANCELLED,
        grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorCode.OVERLOADED,
    }

    assert expected.get(status, ErrorCode.INTERNAL) == serving_error(failed_call(status)).code


def test_text_of_a_foreign_failure_is_not_passed_on() -> None:
    """What grpc says of addresses and sockets is not for clients."""
    error = serving_error(failed_call(grpc.StatusCode.UNAVAILABLE, "failed to connect to 10.0.0.7:7000"))

    assert "10.0.0.7" not in error.message


def test_damaged_detail_is_internal() -> None:
    """Bytes that are no ErrorDetail do not raise."""
    assert ErrorCode.INTERNAL == serving_error(failed_call(grpc.StatusCode.ABORTED, detail=b"\xff\xff")).code


def test_message_limit_is_named() -> None:
    """A message above the limit of the link becomes 413 (OPS-03)."""
    error = serving_error(
        failed_call(grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Sent message larger than max (17 vs. 16)")
    )

    assert (ErrorCode.BODY_TOO_LARGE, True) == (error.code, "16777216 bytes" in error.message)
