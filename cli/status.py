"""`firsttoken status`: what runs, and what it does now, from the gateway's admin port."""

from dataclasses import asdict, dataclass, replace
from typing import cast
from urllib.parse import urlsplit

import httpx
from rich.console import Console
from rich.table import Table

from cli.problem import EXIT_USAGE, CommandProblem
from shared.domain.request import RequestState, Role
from shared.settings import ADMIN_PORT_OFFSET

OK = 200
REQUEST_STATES = tuple(state.value for state in RequestState)
ROLES = tuple(role.value for role in Role)
BLOCK_STATES = ("free", "reserved", "active", "cached", "quarantined")
TIMEOUT_S = 5.0  # the gateway asks scheduler and workers before it answers


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceStatus:
    """One process. `pid` is None where nobody can know it (a Redis elsewhere)."""

    role: str
    id: str
    pid: int | None
    address: str
    admin_url: str
    ready: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemStatus:
    """The document of `--json`. `requests`: by state. `blocks`: by role, then by state."""

    services: tuple[ServiceStatus, ...]
    queue: int
    requests: dict[str, int]
    blocks: dict[str, dict[str, int]]

    def to_json(self) -> dict[str, object]:
        """As it is printed: lists and plain values."""
        return {**asdict(self), "services": [asdict(service) for service in self.services]}


def checked_url(url: str) -> str:
    """Of a gateway, with its scheme, without what stands behind the port. Raises CommandProblem for what is none."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = "" if parts.port is None else f":{parts.port}"
    except ValueError:
        parts, port = None, ""
    if parts is None or parts.scheme not in ("http", "https") or not parts.hostname:
        raise CommandProblem(
            f"{url} is no gateway URL; give one like http://127.0.0.1:8000 with --url", exit_code=EXIT_USAGE
        )
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}{port}"


def admin_url_of(url: str) -> str:
    """The gateway's admin port is its port + 1000. Raises CommandProblem for what is no http URL."""
    parts = urlsplit(checked_url(url))
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{parts.scheme}://{parts.netloc.removesuffix(f':{parts.port}')}:{port + ADMIN_PORT_OFFSET}"


def fetch_status(url: str) -> SystemStatus:
    """With the other gateways that this one names. Raises CommandProblem with a sentence that says what to do."""
    admin_url = admin_url_of(url)
    try:
        document = _ask(admin_url)
    except (httpx.HTTPError, ValueError):
        raise CommandProblem(
            f"no gateway answers at {url} (asked {admin_url}/status); start the system with `firsttoken up`, "
            "or name another gateway with --url"
        ) from None
    try:
        status = parse_status(document)
        peers = parse_peers(document)
    except ValueError as error:
        raise CommandProblem(f"{admin_url}/status is not a firsttoken gateway's answer: {error}") from None
    return replace(status, services=(*status.services, *(_fetch_peer(peer) for peer in peers)))


def _ask(admin_url: str) -> object:
    """None for another status than 200. Raises httpx.HTTPError or ValueError."""
    answer = httpx.get(f"{admin_url}/status", timeout=TIMEOUT_S, trust_env=False)
    return cast("object", answer.json()) if answer.status_code == OK else None


def _fetch_peer(admin_url: str) -> ServiceStatus:
    """Another gateway's word about itself; one that does not answer is not ready."""
    try:
        services = parse_status(_ask(admin_url)).services
        return next(service for service in services if service.role == Role.GATEWAY.value)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, StopIteration):
        name = admin_url.partition("://")[2]
        return ServiceStatus(role=Role.GATEWAY.value, id=name, pid=None, address="", admin_url=admin_url, ready=False)


def parse_status(document: object) -> SystemStatus:
    """Raises ValueError that names what is wrong."""
    match _as_table(document):
        case {"services": services, "queue": int(queue), "requests": requests, "blocks": blocks}:
            return SystemStatus(
                services=tuple(_parse_service(service) for service in _as_list(services)),
                queue=queue,
                requests=_parse_counts(requests),
                blocks={role: _parse_counts(counts) for role, counts in _as_table(blocks).items()},
            )
        case _:
            raise ValueError("services, queue, requests and blocks are expected")


def parse_peers(document: object) -> tuple[str, ...]:
    """Admin URLs of the system's other gateways. Raises ValueError."""
    urls = _as_list(_as_table(document).get("peers", []))
    if not all(isinstance(url, str) for url in urls):
        raise ValueError("a peer is a URL")
    return tuple(str(url) for url in urls)


def _parse_service(document: object) -> ServiceStatus:
    match document:
        case {
            "role": str(role),
            "id": str(service_id),
            "pid": int() | None as pid,
            "address": str(address),
            "admin_url": str(admin_url),
            "ready": bool(ready),
        }:
            return ServiceStatus(role=role, id=service_id, pid=pid, address=address, admin_url=admin_url, ready=ready)
        case _:
            raise ValueError("a service has role, id, pid, address, admin_url and ready")


def _parse_counts(document: object) -> dict[str, int]:
    counts: dict[str, int] = {}
    for state, count in _as_table(document).items():
        match count:
            case int():
                counts[state] = count
            case _:
                raise ValueError(f"the count of {state} is an integer")
    return counts


def _as_list(document: object) -> list[object]:
    match document:
        case list():
            return cast("list[object]", document)
        case _:
            raise ValueError("a list is expected")


def _as_table(document: object) -> dict[str, object]:
    match document:
        case dict():
            return cast("dict[str, object]", document)  # JSON has no other keys
        case _:
            raise ValueError("counts by state are expected")


def show_status(status: SystemStatus, console: Console) -> None:
    """Tables for people."""
    services = Table(
        "role", "id", "pid", "address", "admin", "ready", title=f"services, {status.queue} requests queued"
    )
    for column in services.columns:
        column.overflow = "fold"  # an address that is cut cannot be copied
    for service in sorted(status.services, key=_order):
        services.add_row(
            service.role,
            service.id,
            "-" if service.pid is None else str(service.pid),
            service.address.removeprefix("http://") or "-",
            service.admin_url.removeprefix("http://") or "-",
            "[green]yes[/green]" if service.ready else "[red]no[/red]",
        )
    console.print(services)
    console.print(_count_table("requests", {"all": status.requests}, REQUEST_STATES))
    console.print(_count_table("KV blocks", status.blocks, BLOCK_STATES))


def _order(service: ServiceStatus) -> tuple[int, str]:
    """As a request meets them; a role that we do not know comes last."""
    return (ROLES.index(service.role) if service.role in ROLES else len(ROLES), service.id)


def _count_table(title: str, rows: dict[str, dict[str, int]], order: tuple[str, ...]) -> Table:
    """The states in the order of a life; one that we do not know comes last."""
    found = {state for counts in rows.values() for state in counts}
    states = [*(state for state in order if state in found), *sorted(found.difference(order))]
    table = Table("", *states, title=title)
    for name, counts in sorted(rows.items(), reverse=True):  # prefill before decode
        table.add_row(name, *(str(counts.get(state, 0)) for state in states))
    return table
