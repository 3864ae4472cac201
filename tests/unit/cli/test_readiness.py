"""What `up` waits for, in words."""

import httpx
import pytest

from cli.readiness import ask_readiness


def _client(answer: httpx.Response | httpx.HTTPError) -> httpx.AsyncClient:
    def handle(request: httpx.Request) -> httpx.Response:
        assert "/readyz" == request.url.path
        if isinstance(answer, httpx.HTTPError):
            raise answer
        return answer

    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://gateway")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (httpx.Response(200, json={"ready": True, "reason": ""}), None),
        (httpx.Response(503, json={"ready": False, "reason": "no decode worker"}), "no decode worker"),
        (httpx.Response(503, json={"ready": False, "reason": ""}), "the gateway is not ready"),
        (httpx.Response(503, json=[]), "the gateway is not ready"),
        (httpx.Response(502, text="<html>"), "the gateway is not ready (it answers 502)"),
        (httpx.ConnectError("refused"), "the gateway starts"),
        (httpx.ReadTimeout("slow"), "the gateway starts"),
    ],
)
async def test_reasons(answer: httpx.Response | httpx.HTTPError, reason: str | None) -> None:
    """None means ready; whatever else answers, or nothing, is a wait and no crash."""
    async with _client(answer) as client:
        assert reason == await ask_readiness(client)
