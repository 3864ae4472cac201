"""What surrounds every handler of a server: the cluster token, and one way for errors to leave.

Without `ErrorInterceptor` an exception would reach the client as UNKNOWN with its class and text, and a stray
CancelledError would leave the client waiting for its deadline.

Where requests are a stream, grpc.aio tells a cancelled call twice: the read that waits gets the end of the requests,
like after a half-close, or the write that waits fails, and some time later the handler's task is cancelled, wherever it
is by then: in a `finally` that waits, the rest of the cleanup would not run. Our handlers are told once: who has met
the end is left alone to come to his own.
"""

import asyncio
import contextlib
import hmac
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import Any, NoReturn, TypeAlias, cast

import grpc
import grpc.aio

from shared.aio.scope import spawn
from shared.domain.errors import ErrorCode, ServingError
from shared.obs.logs import get_logger
from shared.rpc.errors import status_of, trailing_metadata_of

TOKEN_METADATA_KEY = "firsttoken-token"
_OPEN_PREFIX = "/grpc.health.v1.Health/"  # probes hold no token
# What a handler that has met the end of its cancelled call may take to come to its own; ours take milliseconds. Less
# than what a server waits for cancelled handlers when it stops.
_OWN_END_S = 0.5

_CALL_IS_OVER = "execute_batch"  # in grpc's words where the client has gone, and its cancel is only on the way to us

# grpc's own handler types are generic over messages that an interceptor does not look at.
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"

_log = get_logger("rpc")


class TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the cluster token, except health checks. An empty token admits everyone."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(  # pyright: ignore[reportIncompatibleMethodOverride] - the stub is generic per call
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None or not self._token or str(handler_call_details.method).startswith(_OPEN_PREFIX):
            return handler
        metadata = dict(handler_call_details.invocation_metadata or ())
        given = metadata.get(TOKEN_METADATA_KEY, "")
        if hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._token):
            return handler
        return _wrapped(handler, _refuse, _refuse)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """ServingError -> its status and detail; anything else that a handler raises is a bug: logged, INTERNAL.

    It also knows which handlers run: grpc's `stop` returns before the handlers that it cancels have ended.
    """

    def __init__(self) -> None:
        self._num_running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Handlers that have not ended."""
        return self._num_running

    async def wait_until_idle(self) -> None:
        """Until no handler runs."""
        await self._idle.wait()

    async def intercept_service(  # pyright: ignore[reportIncompatibleMethodOverride] - the stub is generic per call
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        behaviour = _behaviour_of(handler)

        async def unary(request: Any, context: Context) -> Any:
            try:
                with self._counted():
                    return await behaviour(request, context)
            except BaseException as error:  # noqa: BLE001 - told apart and passed on by the callee
                await _abort(error, method, context)

        async def handle(request: Any, context: Context) -> None:
            # A coroutine that writes, not a generator: so the handler's generator is closed before the call ends.
            with self._counted():
                if not inspect.isasyncgenfunction(behaviour):
                    await behaviour(request, context)
                    return
                async with contextlib.aclosing(behaviour(request, context)) as messages:
                    async for message in messages:
                        await context.write(message)

        async def stream(request: Any, context: Context) -> None:
            try:
                if handler.request_streaming:
                    call = _Call(context)
                    await _tell_cancel_once(handle(call.requests(), cast("Context", call)), call, method)
                else:
                    await handle(request, context)
            except BaseException as error:  # noqa: BLE001 - told apart and passed on by the callee
                await _abort(error, method, context)

        return _wrapped(handler, unary, stream)

    @contextlib.contextmanager
    def _counted(self) -> Generator[None]:
        self._num_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_running -= 1
            if not self._num_running:
                self._idle.set()


class _Call:
    """A call's context that knows whether its handler has met the call's end. What is not here is grpc's."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.is_end_told = False
        self.has_write_failed = False

    async def read(self) -> Any:
        message = await self._context.read()
        self.is_end_told = self.is_end_told or message is grpc.aio.EOF
        return message

    async def write(self, message: Any) -> None:
        try:
            await self._context.write(message)
        except grpc.aio.BaseError:
            self.is_end_told = self.has_write_failed = True
            raise

    async def requests(self) -> AsyncGenerator[Any]:
        """For handlers that iterate."""
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


async def _tell_cancel_once(handling: Coroutine[Any, Any, None], call: _Call, method: str) -> None:
    """Runs the handler in a task of its own, so that its call's cancel can be held back; see the module's docstring."""

    async def caught() -> BaseException | None:
        try:
            await handling
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # noqa: BLE001 - raised below, outside the task group
            return error
        return None

    async with asyncio.TaskGroup() as group:
        task = spawn(group, caught(), name=f"handler {method}")
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            if call.is_end_told:
                await asyncio.wait({task}, timeout=_OWN_END_S)
            task.cancel()
            await asyncio.wait({task})
            if task.cancelled() or task.result() is None:
                raise
    error = task.result()
    if error is not None and not (call.has_write_failed and _is_of_grpc(error)):  # then nobody is left to be told
        raise error


async def _refuse(_request: object, context: Context) -> NoReturn:
    # Without an ErrorDetail: a wrong cluster token is our own mistake, no client may read it as "wrong API key".
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster token is missing or wrong")


async def _abort(error: BaseException, method: str, context: Context) -> NoReturn:
    """Ends the call with the status of `error`; re-raises what is grpc's own or a true cancellation."""
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise error
        # Nobody cancelled the call: the handler waited for something that was cancelled.
    elif isinstance(error, grpc.aio.AbortError) or not isinstance(error, Exception):
        raise error
    if _is_of_grpc(error, _CALL_IS_OVER):  # the handler's own abort, or a write: nobody is left to be told
        raise asyncio.CancelledError from error
    if _is_of_grpc(error, "Server already stopped"):
        raise error  # a handler that wrote while its server stopped: there is no call left to end
    told = _serving_error_in(error)
    if told is None:
        _log.error("handler failed", method=method, exc_info=error)
        told = ServingError(ErrorCode.INTERNAL, "internal error")
    try:
        await context.abort(status_of(told), told.message, trailing_metadata_of(told))
    except grpc.aio.BaseError as failed:
        if not _is_of_grpc(failed, _CALL_IS_OVER):
            raise
        raise asyncio.CancelledError from failed


def _is_of_grpc(error: BaseException, words: str = "") -> bool:
    """Also as the only thing in a group. grpc names them privately; their public base and their words tell them."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return all(_is_of_grpc(part, words) for part in group.exceptions)
    return isinstance(error, grpc.aio.BaseError) and words in str(error)


def _serving_error_in(error: BaseException) -> ServingError | None:
    """Also out of the exception group that a handler's task group makes, if it holds nothing else."""
    if isinstance(error, ServingError):
        return error
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        parts = [_serving_error_in(part) for part in group.exceptions]
        return None if None in parts else parts[0]
    return None


def _behaviour_of(handler: Handler) -> Callable[..., Any]:
    if handler.response_streaming:
        behaviour = handler.stream_stream if handler.request_streaming else handler.unary_stream
    else:
        behaviour = handler.stream_unary if handler.request_streaming else handler.unary_unary
    assert behaviour is not None
    return behaviour


def _wrapped(handler: Handler, unary: Callable[..., Any], stream: Callable[..., Any]) -> Handler:
    if handler.response_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        )
        return make(stream, handler.request_deserializer, handler.response_serializer)
    make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    return make(unary, handler.request_deserializer, handler.response_serializer)
