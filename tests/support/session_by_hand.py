"""Both sides of one session of the gateway in a test's hands: what comes, and in which pass of the loop."""

from gateway.clients.scheduler import ControlEvent, Placed
from gateway.clients.tokens import TokenEvent
from shared.aio.channel import Channel
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import Attempt, Incarnation, WorkerId
from shared.domain.request import CancelReason, Outcome, RequestState

PLACED = Placed(
    attempt=Attempt(1),
    decode_worker=WorkerId("decode-0"),
    decode_address="",
    decode_incarnation=Incarnation(1),
    attach_ticket=b"",
    prefill_worker=WorkerId("prefill-0"),
)


class ByHand:
    """Control stream and token subscription of one session: the test says what comes."""

    def __init__(self) -> None:
        self.control: Channel[ControlEvent] = Channel(8)
        self.tokens: Channel[TokenEvent] = Channel(8)
        self.num_taken = 0

    async def serve(self, _: object, **_callbacks: object) -> "ByHand":
        """The control stream."""
        return self

    async def read(self) -> ControlEvent:
        """Its next event."""
        return await self.control.get()

    async def ask_cancel(self, _: CancelReason) -> None:
        """The scheduler says at once that it is cancelled."""
        error = ServingError(ErrorCode.CANCELLED, "cancelled")
        self.control.try_put(Outcome(state=RequestState.CANCELLED, error=error))

    def attach(self, **_: object) -> "ByHand":
        """The subscription."""
        return self

    async def get(self) -> TokenEvent:
        """Its next event."""
        event = await self.tokens.get()
        self.num_taken += 1
        return event

    def ack(self, _: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""
