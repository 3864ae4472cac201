"""Structured logs on stderr: JSON lines, or coloured text on a terminal. Values are fields, messages constant strings.

Bind context with `structlog.contextvars.bound_contextvars(request_id=..., attempt=...)`.
Never log prompt or output text: tracebacks are written without local variables for that reason.
"""

import logging
import sys
from typing import cast

import structlog
from structlog.typing import FilteringBoundLogger, Processor

# Libraries that speak on every connection or call; their warnings still come through.
_QUIET_LIBRARIES = ("uvicorn", "uvicorn.access", "uvicorn.error", "grpc", "asyncio", "httpx", "httpcore", "filelock")


def configure(role: str, level: str) -> None:
    """Sets up structlog and the standard library's logging, process-wide. `level` is a name like INFO."""
    number = logging.getLevelNamesMapping()[level]
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
        _add_role(role),
    ]
    if sys.stderr.isatty():
        ends: list[Processor] = [structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)]
    else:
        ends = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    structlog.configure(
        processors=[*common, *ends],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        # Not kept on first use: a logger of a module would hold the stream of that moment for ever.
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=common, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ends]
        )
    )
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(number)
    for name in _QUIET_LIBRARIES:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))


def get_logger(name: str) -> FilteringBoundLogger:
    """A logger whose lines carry `component=name`."""
    return cast(FilteringBoundLogger, structlog.get_logger(component=name))


def _add_role(role: str) -> Processor:
    def add(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        event.setdefault("role", role)
        return event

    return add
