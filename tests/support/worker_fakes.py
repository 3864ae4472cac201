"""What stands around a worker's table in a unit test: an engine and a session that only remember."""

from typing import Generic, TypeVar

from shared.wire import scheduler_pb2

Command = TypeVar("Command")


class FakeEngine(Generic[Command]):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.is_busy = False

    def submit(self, command: Command) -> None:
        """Remember it."""
        self.commands.append(command)

    def last_step_age(self) -> float:
        """A constant that can be found again in a heartbeat."""
        return 0.25


class FakeEvents:
    """Keeps what is told to the scheduler."""

    def __init__(self) -> None:
        self.posted: list[scheduler_pb2.WorkerEvent] = []
        self.num_heartbeats_asked = 0

    def post(self, event: scheduler_pb2.WorkerEvent) -> None:
        """Remember it."""
        self.posted.append(event)

    def heartbeat_soon(self) -> None:
        """Count it."""
        self.num_heartbeats_asked += 1

    def names(self) -> list[str]:
        """The kinds of what was told, in order."""
        return [event.WhichOneof("event") or "" for event in self.posted]
