"""Who said no: the peer, or the line."""

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata

from gateway.clients.link import LinkBroken, failure_of
from shared.domain.errors import ErrorCode, ServingError
from shared.rpc.errors import trailing_metadata_of


def rpc_error(code: grpc.StatusCode, error: ServingError | None = None) -> AioRpcError:
    """As grpc raises it, with our detail if there is one."""
    trailing = Metadata(*trailing_metadata_of(error)) if error is not None else Metadata()
    return AioRpcError(code, Metadata(), trailing)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED])
def test_a_status_without_our_detail_is_a_broken_link(code: grpc.StatusCode) -> None:
    """A standby scheduler answers so too: the next try finds the active one."""
    failure = failure_of(rpc_error(code))

    assert isinstance(failure, LinkBroken)
    assert ErrorCode.NO_CAPACITY == failure.told.code


def test_our_detail_is_the_peers_word() -> None:
    """Under any status, whole."""
    said = ServingError(ErrorCode.OVERLOADED, "full", param="p", retry_after_s=3)

    assert said == failure_of(rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, said))
    assert said == failure_of(rpc_error(grpc.StatusCode.UNAVAILABLE, said))


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, ErrorCode.NO_CAPACITY),  # two systems on one Redis: no bug of this one
        (grpc.StatusCode.UNIMPLEMENTED, ErrorCode.INTERNAL),
    ],
)
def test_what_would_come_out_the_same_again_is_final(status: grpc.StatusCode, code: ErrorCode) -> None:
    """A wrong cluster token is no reason to dial again."""
    failure = failure_of(rpc_error(status))

    assert isinstance(failure, ServingError)
    assert code == failure.code
