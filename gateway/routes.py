"""The HTTP routes. What they raise becomes an OpenAI error body by the handlers below, whatever it is."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from dataclasses import replace
from typing import TypeAlias, cast

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.answer import Answer
from gateway.body import BodyReader
from gateway.config import GatewayConfig
from gateway.errors import error_body, error_headers, http_status
from gateway.group import SessionGroup
from gateway.intake import DEFAULT_ALIAS, Intake, IntakeReader, accepts_event_stream, resumable_if_asked
from gateway.journal import Journal
from gateway.request_id import COMPLETION_PREFIX, Identity, key_hash, new_identity, parse_request_id
from gateway.services import Services
from gateway.session import Session
from gateway.sessions import AnySession, Sessions
from gateway.streams import Streams
from gateway.timeouts import TimeoutRule, header_timeout_s
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.request import CancelReason, RequestState

Leave: TypeAlias = Callable[[], None]


class Routes:
    """The handlers, with what they use."""

    def __init__(
        self,
        *,
        services: Services,
        sessions: Sessions,
        bodies: BodyReader,
        reader: IntakeReader,
        streams: Streams,
        executor: Executor,
        config: GatewayConfig,
    ) -> None:
        self._services = services
        self._sessions = sessions
        self._bodies = bodies
        self._reader = reader
        self._streams = streams
        self._executor = executor
        self._config = config
        self._timeouts = TimeoutRule(default_s=config.default_timeout_s, max_s=config.max_timeout_s)
        self._started_unix_s = services.clock.unix_ms() // 1000

    def add_to(self, app: FastAPI) -> None:
        """Routes and error handlers."""
        app.add_api_route("/v1/chat/completions", self.completions, methods=["POST"], response_model=None)
        app.add_api_route("/api/chat", self.chat, methods=["POST"], response_model=None)
        app.add_api_route("/v1/models", self.models, methods=["GET"], response_model=None)
        app.add_api_route("/v1/models/{name:path}", self.model, methods=["GET"], response_model=None)
        app.add_api_route("/v1/requests/{request_id:path}", self.cancel, methods=["DELETE"], response_model=None)
        app.add_api_route("/v1/streams/{request_id:path}", self.resume, methods=["GET"], response_model=None)
        app.add_api_route("/v1/streams/{request_id:path}", self.cancel, methods=["DELETE"], response_model=None)
        app.add_exception_handler(ServingError, self.on_serving_error)
        app.add_exception_handler(HTTPException, self.on_http_exception)
        app.add_exception_handler(Exception, self.on_bug)

    # ---- asking

    async def completions(self, request: Request) -> Answer:
        """POST /v1/chat/completions."""
        return await self._ask(request, self._reader.read_completion)

    async def chat(self, request: Request) -> Answer:
        """POST /api/chat."""
        if not accepts_event_stream(request.headers):
            raise ServingError(
                ErrorCode.NOT_ACCEPTABLE, "this route gives text/event-stream: name it in Accept", param="accept"
            )
        return await self._ask(request, self._reader.read_chat)

    async def resume(self, request: Request, request_id: str) -> Answer:
        """GET /v1/streams/{id}: a resumable answer, from behind what the client has."""
        identity = request.state.identity = replace(self._identity(request), request_id=parse_request_id(request_id))

        async def take_over(journal: Journal, leave: Leave) -> tuple[AnySession, Leave]:
            return await self._streams.resume(identity, request.headers, request.query_params, journal), leave

        return await self._serve(request, "/v1/streams", take_over)

    async def _ask(self, request: Request, read: Callable[[bytearray], Intake]) -> Answer:
        async def take_in(journal: Journal, leave: Leave) -> tuple[AnySession, Leave]:
            header_timeout_s(request.headers)  # a wrong one is refused before the body is read
            async with self._bodies.reading(request) as body:
                intake = await asyncio.get_running_loop().run_in_executor(self._executor, read, body)
            intake = resumable_if_asked(intake, request.headers)
            intake = self._timeouts.with_deadline(intake, request.headers, journal.received_at)
            journal.num_prompt_tokens = len(intake.prompt_ids)
            journal.num_ignored_fields = intake.num_ignored_fields
            if intake.num_ignored_fields:
                self._services.metrics.ignored_fields.add(intake.num_ignored_fields)
            return self._session(intake, request, journal, leave)

        return await self._serve(request, request.url.path, take_in)

    async def _serve(
        self, request: Request, route: str, make: Callable[[Journal, Leave], Awaitable[tuple[AnySession, Leave]]]
    ) -> Answer:
        """Makes a session, given its place, and starts it."""
        identity = self._identity(request)
        journal = Journal(self._services.clock, self._services.metrics, identity, route)
        try:
            leave = self._sessions.enter()
        except ServingError as error:
            journal.write(RequestState.FAILED, error)
            raise
        try:
            session, leave = await make(journal, leave)
            timeout_s = None if session.deadline is None else session.deadline - self._services.clock.monotonic()
            self._sessions.start(session, leave, name=identity.request_id, timeout_s=timeout_s)
        except BaseException as error:
            leave()
            told = error if isinstance(error, ServingError) else None
            is_cancelled = told is not None and told.code is ErrorCode.CANCELLED
            journal.write(RequestState.CANCELLED if is_cancelled else RequestState.FAILED, told)
            raise
        return Answer(
            session.link,
            clock=self._services.clock,
            keep_alive_s=self._config.keep_alive_s,
            stall_timeout_s=self._config.stall_timeout_s,
        )

    def _session(
        self, intake: Intake, request: Request, journal: Journal, leave: Leave
    ) -> tuple[Session | SessionGroup, Leave]:
        """With what gives back its places. Raises OVERLOADED where there is no place for each of several answers."""
        services, identity, asked_by = self._services, self._identity(request), key_hash(request.headers)
        if not intake.children:
            return Session(services, intake, identity, journal, key_hash=asked_by), leave

        def child_journal(child: Identity) -> Journal:
            made = Journal(services.clock, services.metrics, child, journal.route)
            made.num_prompt_tokens = journal.num_prompt_tokens
            return made

        session = SessionGroup(services, intake, identity, journal, child_journal, key_hash=asked_by)
        leave_more = self._sessions.enter(len(intake.children) - 1)

        def leave_all() -> None:
            leave_more()
            leave()

        return session, leave_all

    # ---- the rest

    async def models(self) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._model_object(name) for name in self._names()]})

    async def model(self, name: str) -> Response:
        """GET /v1/models/{name}."""
        self._reader.require_model(name)
        return JSONResponse(self._model_object(name))

    async def cancel(self, request: Request, request_id: str) -> Response:
        """DELETE /v1/requests/{id}: 200 when all is released, 202 when some of it is still owed."""
        bare_id, asked_by = parse_request_id(request_id), key_hash(request.headers)
        answer = await self._services.canceller.cancel_answers(bare_id, asked_by, CancelReason.DELETE)
        body = {
            "id": COMPLETION_PREFIX + bare_id,
            "object": "request.cancellation",
            "outcome": None if answer.state is None else answer.state.value,
            "released": answer.is_released,
            "blocks_freed": answer.blocks_freed,
        }
        return JSONResponse(body, status_code=200 if answer.is_released else 202)

    def _names(self) -> list[str]:
        return list(dict.fromkeys((self._services.served_model_name, DEFAULT_ALIAS)))

    def _model_object(self, name: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._started_unix_s, "owned_by": "firsttoken"}

    def _identity(self, request: Request) -> Identity:
        """Made once a request, kept where the error handlers find it."""
        if not hasattr(request.state, "identity"):
            request.state.identity = new_identity(request.headers, self._services.clock.unix_ms())
        return cast("Identity", request.state.identity)

    # ---- errors

    async def on_serving_error(self, request: Request, error: Exception) -> Response:
        """What our own code raised on purpose."""
        assert isinstance(error, ServingError)
        headers = {**error_headers(error), **self._identity(request).headers}
        return Response(error_body(error), http_status(error), headers, "application/json")

    async def on_http_exception(self, request: Request, error: Exception) -> Response:
        """Starlette's own: no such path, no such method."""
        assert isinstance(error, HTTPException)
        match error.status_code:
            case 404:
                told = ServingError(ErrorCode.NOT_FOUND, "no such path")
            case 405:
                told = ServingError(ErrorCode.METHOD_NOT_ALLOWED, f"{request.method} is not allowed here")
            case _:
                told = ServingError(ErrorCode.INVALID_REQUEST, "the request cannot be read")
        response = await self.on_serving_error(request, told)
        for name, value in (error.headers or {}).items():
            response.headers[name] = value
        return response

    async def on_bug(self, request: Request, error: Exception) -> Response:
        """Anything else; the server logs its traceback."""
        return await self.on_serving_error(request, ServingError(ErrorCode.INTERNAL, "the server failed"))
