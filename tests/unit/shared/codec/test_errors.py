"""Every error survives the wire."""

import pytest

from shared.codec.errors import detail_to_error, error_to_detail
from shared.domain.errors import ErrorCode, ServingError
from shared.wire import common_pb2


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_code_survives_the_wire(code: ErrorCode) -> None:
    """Code, message, param and retry-after come back as they went."""
    error = ServingError(code, "why it failed", param="seed", retry_after_s=7)
    there_and_back = common_pb2.ErrorDetail.FromString(error_to_detail(error).SerializeToString())

    assert error == detail_to_error(there_and_back)


def test_a_code_of_a_newer_peer_is_internal() -> None:
    """And its message is not shown, since nothing is known of it."""
    error = detail_to_error(common_pb2.ErrorDetail(code="FROM_THE_FUTURE", message="secret"))

    assert ServingError(ErrorCode.INTERNAL, "the server failed") == error
