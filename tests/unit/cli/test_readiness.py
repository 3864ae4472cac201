"""What `up` waits for, in words."""

import httpx
import pytest

from cli.readiness import ask_readiness, ask_workers, wait_until_ready


def _client(answer: httpx.Response | httpx.HTTPError, path: str = "/readyz") -> httpx.AsyncClient:
    def handle(request: httpx.Request) -> httpx.Response:
        assert path == request.url.path
        if isinstance(answer, httpx.HTTPError):
            raise answer
        return answer

    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://gateway")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (httpx.Response(200, json={"ready": True, "reason": ""}), None),
        (httpx.Response(503, json={"ready": False, "reason": "no decode worker"}), "no decode worker"),
        (httpx.Response(503, json={"ready": False, "reason": ""}), "the gateway is not ready (it answers 503)"),
        (httpx.Response(503, json=[]), "the gateway is not ready (it answers 503)"),
        (httpx.Response(502, text="<html>"), "the gateway is not ready (it answers 502)"),
        (httpx.ConnectError("refused"), "the gateway starts"),
        (httpx.ReadTimeout("slow"), "the gateway starts"),
    ],
)
async def test_reasons(answer: httpx.Response | httpx.HTTPError, reason: str | None) -> None:
    """None means ready; whatever else answers, or nothing, is a wait and no crash."""
    async with _client(answer) as client:
        assert reason == await ask_readiness(client)


def _status(*services: tuple[str, bool]) -> httpx.Response:
    documents = [
        {"role": role, "id": f"{role}-0", "pid": 1, "address": "", "admin_url": "", "ready": ready}
        for role, ready in services
    ]
    return httpx.Response(200, json={"services": documents, "queue": 0, "requests": {}, "blocks": {}})


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (_status(("gateway", True), ("prefill", True), ("decode", True), ("decode", True)), None),
        (_status(("prefill", True), ("decode", True), ("decode", False)), "1 of 2 decode workers are ready"),
        (_status(("decode", True), ("decode", True)), "0 of 1 prefill workers are ready"),
        (_status(), "0 of 1 prefill workers are ready"),
        (httpx.Response(200, json={"services": ["?"]}), "the gateway has no status (it answers 200)"),
        (httpx.Response(500, text="?"), "the gateway has no status (it answers 500)"),
        (httpx.ConnectError("refused"), "the gateway starts"),
    ],
)
async def test_all_workers_that_were_asked_for(answer: httpx.Response | httpx.HTTPError, reason: str | None) -> None:
    """A gateway is ready with one of each; `up --decode 2` is ready with two."""
    async with _client(answer, "/status") as client:
        assert reason == await ask_workers(client, {"prefill": 1, "decode": 2})


async def test_the_wait_tells_each_reason_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order in which they are met."""
    monkeypatch.setattr("cli.readiness.POLL_S", 0)
    readyz = [httpx.Response(503, json={"reason": "no scheduler"}), httpx.Response(200), httpx.Response(200)]
    status = [_status(("decode", False)), _status(("decode", True))]

    async def get(client: httpx.AsyncClient, path: str) -> httpx.Response:
        assert "http://gateway" == client.base_url
        return readyz.pop(0) if path == "/readyz" else status.pop(0)

    monkeypatch.setattr(httpx.AsyncClient, "get", get)
    heard: list[str] = []

    await wait_until_ready("http://gateway", {"decode": 1}, heard.append)

    assert ["no scheduler", "0 of 1 decode workers are ready"] == heard
