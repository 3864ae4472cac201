"""A token that only a process of the same host can read."""

import os

import pytest

from shared.transfer.host_proof import HostProof, read_token
from shared.transfer.staging import path_of, sealed_file


def test_the_token_is_the_proof() -> None:
    """Who reads it proves it; another token, or none, does not."""
    proof = HostProof()
    token = read_token(proof.path)

    assert token is not None
    assert proof.is_proven_by(token)
    assert not proof.is_proven_by(b"")
    assert not proof.is_proven_by(bytes(32))
    proof.close()
    assert read_token(proof.path) is None


@pytest.mark.parametrize("path", ["", "/etc/hostname", "/proc/1/fd/1x", "/proc/99999999/fd/3"])
def test_what_is_no_open_file_of_a_process_here_gives_no_token(path: str) -> None:
    """Another host's path leads nowhere here, or to something else."""
    assert read_token(path) is None


def test_another_file_gives_another_token() -> None:
    """The number of a file may mean another one here: it is read, and proves nothing."""
    proof = HostProof()
    other = sealed_file(32)
    token = read_token(path_of(other))

    assert token == bytes(32)
    assert not proof.is_proven_by(bytes(32))
    os.close(other)
    proof.close()
