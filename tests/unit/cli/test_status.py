"""`firsttoken status`: the document, its tables, and what is said when nobody answers."""

import io
from typing import Any

import httpx
import pytest
from rich.console import Console

from cli.problem import EXIT_FAILED, EXIT_USAGE, CommandProblem
from cli.status import admin_url_of, checked_url, fetch_status, parse_peers, parse_status, show_status


def _document() -> dict[str, Any]:
    return {
        "services": [
            {
                "role": "decode",
                "id": "decode-0",
                "pid": 42,
                "address": "127.0.0.1:7200",
                "admin_url": "http://127.0.0.1:8200",
                "ready": True,
            },
            {"role": "redis", "id": "redis", "pid": None, "address": "h:6379", "admin_url": "", "ready": False},
        ],
        "queue": 3,
        "requests": {"queued": 3, "decoding": 2},
        "blocks": {"decode": {"free": 10, "active": 6}},
    }


@pytest.mark.parametrize(
    ("url", "admin_url"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:9000"),
        ("127.0.0.1:8123", "http://127.0.0.1:9123"),
        ("http://[::1]:8000", "http://[::1]:9000"),
        ("http://gateway", "http://gateway:1080"),
    ],
)
def test_the_admin_port_is_the_port_plus_1000(url: str, admin_url: str) -> None:
    """So one URL is enough to name a gateway."""
    assert admin_url == admin_url_of(url)


@pytest.mark.parametrize(
    ("url", "checked"),
    [("host", "http://host"), ("https://host:1/path?q", "https://host:1"), ("[::1]:8000", "http://[::1]:8000")],
)
def test_a_url_is_scheme_host_and_port(url: str, checked: str) -> None:
    """What is behind them is not ours to keep."""
    assert checked == checked_url(url)


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port", "http://host:99999"])
def test_what_is_no_url_is_wrong_usage(url: str) -> None:
    """One sentence, exit code 2."""
    with pytest.raises(CommandProblem) as caught:
        admin_url_of(url)

    assert EXIT_USAGE == caught.value.exit_code
    assert url in caught.value.sentence


def test_the_document_survives_reading_and_printing() -> None:
    """`--json` prints exactly what the gateway said."""
    assert _document() == parse_status(_document()).to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"queue": "3"},
        {"services": [{"role": "decode"}]},
        {"requests": {"queued": "many"}},
        {"blocks": None},
        {"blocks": {"decode": None}},
    ],
)
def test_another_document_is_refused(change: dict[str, Any]) -> None:
    """Something else that listens on the port is not shown as a status."""
    with pytest.raises(ValueError, match=r"expected|has role|is an integer"):
        parse_status(_document() | change)


def test_the_table_shows_every_service_and_count() -> None:
    """For people: which are not ready is to be seen."""
    out = io.StringIO()

    show_status(parse_status(_document()), Console(file=out, width=160))

    text = out.getvalue()
    for word in ("decode-0", "127.0.0.1:7200", "42", "yes", "redis", "no", "3 requests queued", "decoding", "active"):
        assert word in text


def test_states_are_in_the_order_of_a_life() -> None:
    """Whatever the order in the document; a state of a newer gateway is shown too, last."""
    out = io.StringIO()
    requests = {"sleeping": 1, "decoding": 2, "queued": 3, "prefilling": 0}

    show_status(parse_status(_document() | {"requests": requests}), Console(file=out, width=160))

    (head,) = [line for line in out.getvalue().splitlines() if "decoding" in line]
    assert ["queued", "prefilling", "decoding", "sleeping"] == [word for word in head.split() if word.isalpha()]


def test_nobody_there_is_said_with_what_to_do(unused_tcp_port: int) -> None:
    """Exit code 1, and how to start a system or name another one."""
    with pytest.raises(CommandProblem) as caught:
        fetch_status(f"http://127.0.0.1:{min(unused_tcp_port, 64_000)}")

    assert EXIT_FAILED == caught.value.exit_code
    assert "firsttoken up" in caught.value.sentence
    assert "--url" in caught.value.sentence


def _gateway(name: str, port: int) -> dict[str, Any]:
    return {
        "role": "gateway",
        "id": name,
        "pid": port,
        "address": f"http://h:{port}",
        "admin_url": f"http://h:{port + 1000}",
        "ready": True,
    }


def test_the_other_gateways_are_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its row by its own word; one that is away is shown as not ready. The rest is the first one's."""
    first, second = (
        _document() | {"services": [_gateway(name, port), *_document()["services"]], "queue": port}
        for name, port in (("gateway-1", 1), ("gateway-2", 2))
    )
    documents = {
        "http://h:1001/status": first | {"peers": ["http://h:1002", "http://h:1003"]},
        "http://h:1002/status": second,
    }

    def get(url: str, **_: Any) -> httpx.Response:
        if url not in documents:
            raise httpx.ConnectError("refused")
        return httpx.Response(200, json=documents[url])

    monkeypatch.setattr(httpx, "get", get)

    status = fetch_status("http://h:1")

    gateways = [service for service in status.services if service.role == "gateway"]
    assert [("gateway-1", 1, True), ("gateway-2", 2, True), ("h:1003", None, False)] == [
        (service.id, service.pid, service.ready) for service in gateways
    ]
    assert (5, 1) == (len(status.services), status.queue)


def test_peers_are_urls() -> None:
    """None where the gateway names none."""
    assert () == parse_peers(_document())
    with pytest.raises(ValueError, match="URL"):
        parse_peers(_document() | {"peers": [1]})
