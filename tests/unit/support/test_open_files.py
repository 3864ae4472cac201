"""Counts of this very process, before and after it opens one of each kind."""

import os
import socket

from tests.support.open_files import OpenFiles, open_files


def counts(files: OpenFiles) -> tuple[int, int, int, int, int]:
    """By kind."""
    return files.redis, files.scrapes, files.connections, files.memory, files.others


def test_each_kind_is_told_from_the_others() -> None:
    """A connection counts by the port that it goes to, or was taken at; one that listens is no connection."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    store, admin, peer = (listener.getsockname()[1] for listener in listeners)

    def look() -> tuple[int, int, int, int, int]:
        return counts(open_files(os.getpid(), redis_port=store, admin_port=admin))

    before = look()
    opened = [socket.create_connection(("127.0.0.1", port)) for port in (store, admin, peer)]
    taken = [listener.accept()[0] for listener in listeners]
    memory, pipe = os.memfd_create("test"), os.pipe()
    grown = [now - then for now, then in zip(look(), before, strict=True)]
    for connection in (*opened, *taken, *listeners):
        connection.close()
    for descriptor in (memory, *pipe):
        os.close(descriptor)

    # To the store; taken at the admin port; both ends with the peer, and the other ends of the first two; memory; a pipe.
    assert [1, 1, 4, 1, 2] == grown
