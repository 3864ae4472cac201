"""Chat messages into prompt tokens, by the model's own template, and the tables for the way back.

Loads no torch: the tokenizer class used here does not need it, the Auto classes would. `shared.text` and `shared.model`
do not import each other, so the few facts needed from a prepared folder are read here from its `firsttoken.json`.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jinja2

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import TokenId
from shared.text.detokenizer import Detokenizer
from shared.text.pieces import TokenPieces, token_pieces
from shared.text.script import SCRIPTED_EOS_ID, SCRIPTED_VOCAB_SIZE, SCRIPTED_WINDOW, Script

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_TEMPLATE_ERROR_CHARS = 500  # a template's own words are a sentence; anything longer is somebody's data


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One turn. `content` is plain text: text parts have been joined before."""

    role: str
    content: str


class ChatTokenizer(ABC):
    """Everything the edge of the system knows about a model's tokens. Safe to use from several threads at once."""

    window: int
    """Tokens that prompt and answer may have together."""
    eos_ids: frozenset[TokenId]
    """Tokens that end an answer."""
    vocab_size: int
    """Token ids are below this."""

    @staticmethod
    def load(model_dir: Path) -> "ChatTokenizer":
        """The tokenizer of a prepared folder; OSError or ValueError when the folder is not one. Takes a second."""
        from transformers import PreTrainedTokenizerFast  # here, so that a scripted gateway does not wait for it

        facts = cast("dict[str, Any]", json.loads((model_dir / "firsttoken.json").read_text(encoding="utf-8")))
        tokenizer = cast("Any", PreTrainedTokenizerFast).from_pretrained(str(model_dir), local_files_only=True)
        return ModelChatTokenizer(tokenizer, window=facts["window"], eos_ids=frozenset(facts["eos_ids"]))

    @staticmethod
    def scripted() -> "ChatTokenizer":
        """The stand-in for scripted runs."""
        return ScriptedChatTokenizer()

    @abstractmethod
    def render(self, messages: Sequence[ChatMessage]) -> tuple[TokenId, ...]:
        """The prompt, ready for the assistant's turn. Slow for long texts: call it in a thread.

        Raises ServingError INVALID_REQUEST when the messages do not fit, with the template's words where it refuses
        them.
        """

    @abstractmethod
    def detokenizer(self, prompt_ids: Sequence[TokenId], stop: Sequence[str] = ()) -> Detokenizer:
        """The text of one answer to this prompt."""

    def token_name(self, token_id: TokenId) -> str:
        """What a token without text is called; empty where it has no name."""
        return ""


class ModelChatTokenizer(ChatTokenizer):
    """The tokenizer and chat template of a real model."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", *, window: int, eos_ids: frozenset[TokenId]) -> None:
        self.window = window
        self.eos_ids = eos_ids
        self._template_source = cast("Any", tokenizer)
        # Encoding goes to the inner tokenizer: the outer one sets truncation at every call, which fails when another
        # thread is encoding.
        self._encoder = self._template_source.backend_tokenizer
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._pieces: TokenPieces = token_pieces(json.loads(self._encoder.to_str()), eos_ids)
        self.vocab_size = len(self._pieces.pieces)
        added: Sequence[Any] = self._encoder.get_added_tokens_decoder().values()
        # No bound where text may shrink before it is cut into tokens.
        self._longest_bytes = (
            0
            if self._encoder.normalizer
            else max(map(len, (*self._pieces.pieces, *(token.content.encode() for token in added))))
        )

    def render(self, messages: Sequence[ChatMessage]) -> tuple[TokenId, ...]:
        """As the base says. The template writes the begin token if it wants one; the tokenizer adds none."""
        conversation = [{"role": message.role, "content": message.content} for message in messages]
        try:
            text: str = self._template_source.apply_chat_template(
                conversation, tokenize=False, add_generation_prompt=True
            )
            num_bytes = len(text.encode())
        except jinja2.TemplateError as error:
            words = (error.message or type(error).__name__)[:MAX_TEMPLATE_ERROR_CHARS]
            raise ServingError(ErrorCode.INVALID_REQUEST, f"chat template: {words}", param="messages") from None
        except UnicodeEncodeError:
            raise _half_a_surrogate() from None
        self._require_short_enough(num_bytes)
        # As a batch of one: `encode` keeps the interpreter's lock, and a large prompt would stop the gateway.
        ids: list[TokenId] = self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if not ids:
            raise ServingError(ErrorCode.INVALID_REQUEST, "the messages give an empty prompt", param="messages")
        return tuple(ids)

    def _require_short_enough(self, num_bytes: int) -> None:
        """What even the longest tokens could not bring into the window is refused before seconds are spent on it."""
        min_tokens = -(-num_bytes // self._longest_bytes) if self._longest_bytes else 0
        if min_tokens > self.window:
            raise ServingError(
                ErrorCode.CONTEXT_TOO_LONG,
                f"the window of this model is {self.window} tokens; the prompt has at least {min_tokens}",
                param="messages",
            )

    def detokenizer(self, prompt_ids: Sequence[TokenId], stop: Sequence[str] = ()) -> Detokenizer:
        """As the base says. The first blank is the tokenizer's own only where no text stands before it."""
        at_text_start = self._pieces.strips_leading_blank and not any(map(self._pieces, prompt_ids))
        return Detokenizer(self._pieces, stop, strips_leading_blank=at_text_start)

    def token_name(self, token_id: TokenId) -> str:
        """As the tokenizer writes it, `<|im_end|>` for one."""
        return self._encoder.id_to_token(token_id) or ""


class ScriptedChatTokenizer(ChatTokenizer):
    """The stand-in for scripted runs: the prompt is the last user message, one token a byte."""

    window = SCRIPTED_WINDOW
    eos_ids = frozenset({SCRIPTED_EOS_ID})
    vocab_size = SCRIPTED_VOCAB_SIZE

    def render(self, messages: Sequence[ChatMessage]) -> tuple[TokenId, ...]:
        """As the base says; the script is checked here, before anything is admitted."""
        scripts = [message.content for message in messages if message.role == "user"]
        if not scripts:
            raise ServingError(ErrorCode.INVALID_REQUEST, "script: there is no user message", param="messages")
        try:
            source = scripts[-1].encode("utf-8")
        except UnicodeEncodeError:
            raise _half_a_surrogate() from None
        Script.parse(source)
        return tuple(TokenId(byte) for byte in source)

    def detokenizer(self, prompt_ids: Sequence[TokenId], stop: Sequence[str] = ()) -> Detokenizer:
        """As the base says; the table of pieces is built from the prompt."""
        return Detokenizer(Script.from_prompt(prompt_ids).token_bytes, stop)


def _half_a_surrogate() -> ServingError:
    return ServingError(
        ErrorCode.INVALID_REQUEST, "a message holds half of a surrogate pair, which is no text", param="messages"
    )
