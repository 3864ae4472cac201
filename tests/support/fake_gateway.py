"""A gateway in a thread that keeps to the stream contract and cuts its connections at chosen bytes."""

import contextlib
import json
import threading
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REQUEST_ID = "01JZZZZZZZZZZZZZZZZZZZZZZZ"
USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """One event of an answer. `token_index` None = without an `id:` line."""

    data: dict[str, Any] | str
    token_index: int | None = None

    def bytes(self) -> bytes:
        """On the wire; characters as they are, so that a cut can fall inside one."""
        data = (
            self.data
            if isinstance(self.data, str)
            else json.dumps(self.data, ensure_ascii=False, separators=(",", ":"))
        )
        name = b"" if self.token_index is None else b"id: %d\n" % self.token_index
        return name + b"data: " + data.encode() + b"\n\n"


def delta(text: str, token_index: int | None = None) -> Said:
    """A chunk with text."""
    return Said(data={"choices": [{"delta": {"content": text}}]}, token_index=token_index)


def finish(reason: str = "stop") -> list[Said]:
    """The last chunks of an answer."""
    return [
        Said(data={"choices": [{"delta": {}, "finish_reason": reason}]}),
        Said(data={"choices": [], "usage": USAGE}),
        Said(data="[DONE]"),
    ]


def failure(code: str, message: str = "it failed") -> list[Said]:
    """An error within a stream."""
    return [Said(data={"error": {"message": message, "code": code}}), Said(data="[DONE]")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any

    @property
    def line(self) -> str:
        return f"{self.method} {self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An answer in a stream's place; without a code it is what a proxy would say. Status 0 = the connection is cut."""

    status: int
    code: str = ""
    headers: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(slots=True, kw_only=True)
class FakeGateway:
    """`answer` is what each question gets, resumed behind `Last-Event-ID`."""

    answer: Sequence[Said]
    cuts: deque[int] = field(default_factory=deque[int])
    """For each of the next streams: after how many bytes of its body the connection is closed."""
    refusals: deque[Refusal | None] = field(default_factory=deque[Refusal | None])
    """For each of the next requests; None = none."""
    resumes: Sequence[Said] | None = None
    """What a resumed stream gives, whatever was held; None = the answer's rest."""
    is_plain: bool = False
    """No request id: another kind of server."""
    has_length: bool = True
    """Bodies are chunked, so that a cut shows; otherwise the end of the connection is the end of the body."""
    asked: list[Asked] = field(default_factory=list[Asked])
    url: str = ""

    def body(self, after: int | None) -> bytes:
        """Of a stream behind so many tokens, from its beginning for None."""
        if after is not None and self.resumes is not None:
            return b"".join(said.bytes() for said in self.resumes)
        return b"".join(said.bytes() for said in self.answer[self._place_behind(after or 0) :])

    def _place_behind(self, token_index: int) -> int:
        """Of the first event that a reader with so many tokens lacks: more under the same id it may lack too."""
        held = {said.token_index: place + 1 for place, said in reversed(list(enumerate(self.answer)))}
        return max((place for index, place in held.items() if index is not None and index <= token_index), default=0)

    @property
    def lines(self) -> list[str]:
        """What was asked, in order."""
        return [asked.line for asked in self.asked]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    gateway: FakeGateway

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class names it
        """Says nothing."""

    def do_POST(self) -> None:
        self._handle()

    def do_GET(self) -> None:
        self._handle()

    def do_DELETE(self) -> None:
        self._handle()

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.gateway.asked.append(
            Asked(method=self.command, path=self.path, headers=headers, body=json.loads(body) if body else None)
        )
        self.close_connection = True
        refusal = self.gateway.refusals.popleft() if self.gateway.refusals else None
        if refusal is not None:
            self._refuse(refusal)
        elif self.command == "DELETE":
            self._whole(200, {"released": True}, {})
        elif self.path == "/v1/models":
            self._whole(200, {"data": [{"id": "tiny"}, {"id": "default"}]}, {})
        else:
            held = headers.get("last-event-id")
            self._stream(self.gateway.body(None if held is None else int(held)))

    def _refuse(self, refusal: Refusal) -> None:
        if refusal.status == 0:
            return
        document: object = {"error": {"message": "refused", "code": refusal.code}} if refusal.code else "Bad Gateway"
        self._whole(refusal.status, document, refusal.headers)

    def _whole(self, status: int, document: object, headers: dict[str, str]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body)), "connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, body: bytes) -> None:
        gateway = self.gateway
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        if not gateway.is_plain:
            self.send_header("x-firsttoken-request", REQUEST_ID)
        if gateway.has_length:
            self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        sent = body[: gateway.cuts.popleft()] if gateway.cuts else body
        is_whole = len(sent) == len(body)
        if gateway.has_length:
            ending = b"0\r\n\r\n" if is_whole else b""
            sent = (b"%x\r\n%b\r\n" % (len(sent), sent) if sent else b"") + ending
        with contextlib.suppress(OSError):  # the client has left
            self.wfile.write(sent)


@contextlib.contextmanager
def fake_gateway(answer: Sequence[Said], **options: Any) -> Generator[FakeGateway]:
    """Listens until the block is left."""
    gateway = FakeGateway(answer=answer, **options)
    handler = type("Handler", (_Handler,), {"gateway": gateway})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        gateway.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=lambda: server.serve_forever(poll_interval=0.01), daemon=True)
        thread.start()
        try:
            yield gateway
        finally:
            server.shutdown()
            thread.join()
