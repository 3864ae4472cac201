"""The proof that two workers share a host: what one put into its memory, the other can read.

Names and addresses prove nothing (containers, tunnels). The same way is taken as for frames afterwards, so what the
proof passes works for them as well.
"""

import os
import secrets

from shared.transfer.staging import StagingError, open_peer, path_of, sealed_file

TOKEN_BYTES = 32


class HostProof:
    """The sender's side: a random token in an anonymous file, as long as the process lives."""

    def __init__(self) -> None:
        """Raises OSError where the system has no such files."""
        self.token = secrets.token_bytes(TOKEN_BYTES)
        self._descriptor = sealed_file(TOKEN_BYTES)
        os.pwrite(self._descriptor, self.token, 0)
        self.path = path_of(self._descriptor)

    def is_proven_by(self, answer: bytes) -> bool:
        return secrets.compare_digest(self.token, answer)

    def close(self) -> None:
        os.close(self._descriptor)


def read_token(path: str) -> bytes | None:
    """The receiver's side: the token behind a peer's path; None where it cannot be read from here."""
    try:
        descriptor = open_peer(path, TOKEN_BYTES)
    except StagingError:
        return None
    try:
        return os.pread(descriptor, TOKEN_BYTES, 0)
    except OSError:
        return None
    finally:
        os.close(descriptor)
