"""What the worker's table speaks to, as far as it needs it."""

from typing import Protocol

from shared.engine.decode_runner import DecodeCommand
from shared.wire import scheduler_pb2


class DecodeEngine(Protocol):
    """The step loop."""

    @property
    def is_busy(self) -> bool: ...

    def submit(self, command: DecodeCommand) -> None: ...

    def last_step_age(self) -> float: ...


class EventSink(Protocol):
    """The session with the scheduler."""

    def post(self, event: scheduler_pb2.WorkerEvent) -> None: ...

    def heartbeat_soon(self) -> None: ...
