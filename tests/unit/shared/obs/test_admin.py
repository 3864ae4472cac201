import asyncio
from collections.abc import AsyncGenerator, Mapping

import httpx
import pytest
from structlog.testing import capture_logs

from shared.aio.scope import spawn
from shared.obs.admin import TEXT, AdminServer, bind, json_page


class Served:
    """A running admin server and a client that keeps its connections."""

    def __init__(self, admin: AdminServer, http: httpx.AsyncClient, port: int) -> None:
        self.admin = admin
        self.http = http
        self.port = port

    async def get(self, path: str, method: str = "GET") -> tuple[int, str]:
        """Status and body."""
        answer = await self.http.request(method, f"http://127.0.0.1:{self.port}{path}")
        return answer.status_code, answer.text


@pytest.fixture
async def served() -> AsyncGenerator[Served]:
    """On a port of the kernel's choice. The client's idle connections are still open at the end."""
    admin = AdminServer()
    sock = bind("127.0.0.1", 0)
    port = sock.getsockname()[1]
    async with httpx.AsyncClient(timeout=30.0) as http:
        async with admin.serve(sock):
            yield Served(admin, http, port)
        with pytest.raises(httpx.TransportError):
            await http.get(f"http://127.0.0.1:{port}/")


async def text_page() -> tuple[int, str, bytes]:
    """A page with a status of its own."""
    return 503, TEXT, b"not now\n"


async def test_pages_by_path_and_method(served: Served) -> None:
    """Its own status and body; HEAD without the body; anything else is refused."""
    served.admin.add("/page", text_page)

    assert (503, "not now\n") == await served.get("/page")
    assert (503, "") == await served.get("/page", "HEAD")
    assert (405, "GET only\n") == await served.get("/page", "POST")
    assert (404, "not found\n") == await served.get("/page/")


async def test_path_is_served_once(served: Served) -> None:
    """Two owners of one path would be a mistake in the wiring."""
    served.admin.add("/page", text_page)
    with pytest.raises(ValueError, match="/page"):
        served.admin.add("/page", text_page)


async def test_json_page_and_a_page_that_fails(served: Served) -> None:
    """A failing page is a 500 without details, with its traceback in the log; the others go on."""

    async def status() -> Mapping[str, object]:
        if not answers:
            raise KeyError("private")
        return {"queue": answers.pop()}

    answers = [3]
    served.admin.add("/status", json_page(status))
    assert (200, '{"queue": 3}') == await served.get("/status")
    with capture_logs() as logs:
        assert (500, "internal error\n") == await served.get("/status")
    assert ["admin page failed"] == [line["event"] for line in logs]


async def test_slow_page_holds_up_no_other(served: Served) -> None:
    """Pages are answered side by side."""
    go_on = asyncio.Event()

    async def slow() -> Mapping[str, object]:
        await go_on.wait()
        return {}

    served.admin.add("/slow", json_page(slow))
    served.admin.add("/page", text_page)
    async with asyncio.TaskGroup() as group:
        waiting = spawn(group, served.get("/slow"), name="slow")
        assert (503, "not now\n") == await served.get("/page")
        assert not waiting.done()
        go_on.set()

    assert (200, "{}") == waiting.result()


def test_taken_port_is_an_error() -> None:
    """Told before anything is served."""
    with bind("127.0.0.1", 0) as sock:
        sock.listen()
        with pytest.raises(OSError, match="in use"):
            bind("127.0.0.1", sock.getsockname()[1])
