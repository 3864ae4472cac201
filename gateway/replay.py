"""An answer that has ended, shown again from its log alone: neither scheduler nor workers hear of it."""

import asyncio

from gateway.answer import ClientLink, Frame
from gateway.answer_writer import AnswerWriter
from gateway.intake import Intake
from gateway.journal import Journal
from gateway.request_id import Identity
from gateway.served_form import ServedForm
from gateway.services import Resumption
from shared.aio.scope import stop_when
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.request import CancelReason, FinishReason, Outcome, RequestState


class Replay:
    """Looks like a `Session`: make it, `spawn` its `run`, hand its `link` to an Answer."""

    is_stream = True
    deadline: float | None = None  # everything is there

    def __init__(
        self,
        intake: Intake,
        identity: Identity,
        journal: Journal,
        served: ServedForm,
        *,
        model: str,
        resumption: Resumption,
        outcome: Outcome,
    ) -> None:
        self._journal = journal
        self._tokens = resumption.logged.tokens
        self._outcome = outcome
        self._stopped = asyncio.Event()
        self.link = ClientLink(on_taken=self._on_taken, on_gone=self._stopped.set, on_stalled=self._on_stalled)
        self._writer = AnswerWriter(
            intake, identity, served, link=self.link, model=model, from_index=resumption.from_index
        )

    def cancel(self, reason: CancelReason, error: ServingError) -> None:
        """Nothing is at work: the client is cut off, and may ask again elsewhere."""
        self._journal.cancel_reason = reason
        self._stopped.set()

    async def run(self) -> None:
        """To its end, or until nobody reads."""
        try:
            async with stop_when(self._stopped):
                await self._show()
            self.link.out.close()
            await self.link.is_over.wait()  # the stall clock bounds it
        finally:
            self.link.out.close()
            self._journal.usage = self._writer.usage
            is_cut = self._stopped.is_set()
            self._journal.write(RequestState.CANCELLED if is_cut else self._outcome.state, self._outcome.error)

    async def _show(self) -> None:
        writer = self._writer
        await writer.show_logged(self._tokens)
        if self._outcome.error is not None:
            await writer.tell_error(self._outcome.error, writer.flush())
            return
        reason = self._outcome.finish_reason or FinishReason.STOP
        await writer.put_end(writer.flush(), reason, last_index=writer.num_tokens + 1)

    def _on_taken(self, frame: Frame) -> None:
        if frame.has_text:
            self._journal.mark_first_text_sent(is_stream=False)  # no time to first token: nothing was computed

    def _on_stalled(self) -> bytes | None:
        self._stopped.set()
        return self._writer.last_words(ServingError(ErrorCode.SLOW_CLIENT, "the client did not read for too long"))
