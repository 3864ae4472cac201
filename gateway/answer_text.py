"""The text of one answer, token by token, and the log probabilities of the tokens that it is made of."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from shared.domain.ids import TokenId
from shared.domain.sampling import SamplingParams, TokenLogprobs
from shared.text.detokenizer import Detokenizer

LogprobEntry = dict[str, object]
"""One item of OpenAI's `logprobs.content`."""


@dataclass(frozen=True, slots=True)
class TextPart:
    """New text, with the entries of the tokens that begin in it; without text there are none."""

    text: str
    logprobs: tuple[LogprobEntry, ...] = ()
    is_stop: bool = False
    """A stop string is complete: nothing more comes."""


class AnswerText:
    """Feed it each token once, in order, then `flush`.

    A token is listed with the part that shows the first of its text, so that parts joined are the same however they
    were cut; a token whose text is never shown (special, an end token, of a stop string) is not listed. The request's
    own end tokens have no text where they end the answer.
    """

    def __init__(
        self, detokenizer: Detokenizer, *, sampling: SamplingParams, token_name: Callable[[TokenId], str]
    ) -> None:
        """`token_name` names a token without text."""
        self._detokenizer = detokenizer
        self._sampling = sampling
        self._token_name = token_name
        self._num_tokens = 0
        self._num_shown = 0  # characters
        self._held: deque[tuple[int, LogprobEntry]] = deque()  # with the number of the character where each begins

    def feed(self, token_id: TokenId, logprobs: TokenLogprobs | None = None) -> TextPart:
        """The next token."""
        self._num_tokens += 1
        sampling = self._sampling
        if token_id in sampling.stop_token_ids and self._num_tokens > sampling.min_tokens:
            return TextPart("")
        if logprobs is not None and self._detokenizer.token_bytes(token_id):
            self._held.append((self._num_shown + self._detokenizer.num_held_chars, self._entry(token_id, logprobs)))
        emission = self._detokenizer.feed((token_id,))
        return self._part(emission.text, is_stop=emission.stop_index is not None)

    def flush(self) -> TextPart:
        """The answer has ended: what was held back."""
        return self._part(self._detokenizer.flush())

    def _part(self, text: str, *, is_stop: bool = False) -> TextPart:
        self._num_shown += len(text)
        begun: list[LogprobEntry] = []
        while self._held and self._held[0][0] < self._num_shown:
            begun.append(self._held.popleft()[1])
        return TextPart(text, tuple(begun), is_stop)

    def _entry(self, token_id: TokenId, logprobs: TokenLogprobs) -> LogprobEntry:
        top = [self._named(other, logprob) for other, logprob in logprobs.top]
        return {**self._named(token_id, logprobs.logprob), "top_logprobs": top}

    def _named(self, token_id: TokenId, logprob: float) -> LogprobEntry:
        piece = self._detokenizer.token_bytes(token_id)
        if not piece:
            return {"token": self._token_name(token_id), "logprob": logprob, "bytes": None}
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}
