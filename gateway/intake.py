"""From the bytes of a body to an `Intake`: parsed, checked, rendered, tokenised. After this nothing is unvalidated.

Everything here is synchronous and may take milliseconds for a large body: it runs in the intake executor.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from hashlib import blake2b
from typing import Any, NoReturn, cast

from gateway.answer_text import AnswerText
from gateway.schemas import ChatBody, CompletionBody, GenerationBody, Message, refuse_unsupported_messages
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import RequestId, TokenId
from shared.domain.request import RequestSpec
from shared.domain.sampling import MAX_SEED, SamplingParams
from shared.text.chat import ChatMessage, ChatTokenizer

DEFAULT_ALIAS = "default"
_MAX_NAME_CHARS = 64  # of a client's text in an error message
_MAX_ID_DIGITS = 10  # ids have 32 bits


class AnswerForm(Enum):
    """How the client wants its answer."""

    WHOLE = "whole"
    CHUNKS = "chunks"  # OpenAI's event stream
    NAMED_EVENTS = "named_events"


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """A valid question. `max_tokens` None = as many as fit. `text` is fresh and serves this one answer."""

    prompt_ids: tuple[TokenId, ...]
    max_tokens: int | None
    sampling: SamplingParams
    kv_salt: int
    ignore_eos: bool
    has_stop_strings: bool
    text: AnswerText
    form: AnswerForm
    include_usage: bool
    num_ignored_fields: int
    window: int
    stop: tuple[str, ...] = ()
    is_resumable: bool = False
    timeout_s: float | None = None
    """As the body asks for; see `gateway.timeouts`."""
    deadline: float | None = None
    """When the client's time is over, by this gateway's clock."""
    choice: int | None = None
    """Which answer of several; None where there is one."""
    children: tuple["Intake", ...] = ()
    """Where several answers are wanted: the question of each, the same but for seed and text."""
    eos_ids: frozenset[TokenId] = frozenset()
    """Of the model, also where they are ignored."""

    @property
    def has_logprobs(self) -> bool:
        return self.sampling.top_logprobs is not None

    def spec(self, request_id: RequestId, max_request_tokens: int) -> RequestSpec:
        """What the workers get. `max_request_tokens` is what the largest KV pool holds; 0 = not known.

        A prompt that alone is too long for the pools asks for one token and is left to the scheduler's refusal.
        """
        room = min(self.window, max_request_tokens or self.window) - len(self.prompt_ids)
        return RequestSpec(
            request_id=request_id,
            prompt_ids=self.prompt_ids,
            max_tokens=max(1, room) if self.max_tokens is None else self.max_tokens,
            sampling=self.sampling,
            ignore_eos=self.ignore_eos,
            has_stop_strings=self.has_stop_strings,
            kv_salt=self.kv_salt,
        )


def child_seed(seed: int, choice: int) -> int:
    """Of answer `choice` (from 0) of several: the first 8 bytes of blake2b(seed, choice), numbers little-endian."""
    source = seed.to_bytes(8, "little") + choice.to_bytes(8, "little")
    return int.from_bytes(blake2b(source).digest()[:8], "little")


class IntakeReader:
    """Knows the model's name and its tokenizer. Thread-safe: it holds nothing that changes."""

    def __init__(self, tokenizer: ChatTokenizer, served_model_name: str) -> None:
        self._tokenizer = tokenizer
        self._names = (served_model_name, DEFAULT_ALIAS)

    def read_completion(self, body: bytes | bytearray) -> Intake:
        """POST /v1/chat/completions. Raises ServingError."""
        parsed = CompletionBody.parse(parse_object(body))
        self.require_model(parsed.model)
        return self._finish(parsed, parsed.messages, AnswerForm.CHUNKS if parsed.stream else AnswerForm.WHOLE)

    def read_chat(self, body: bytes | bytearray) -> Intake:
        """POST /api/chat, which answers with events only. Raises ServingError."""
        parsed = ChatBody.parse(parse_object(body))
        if parsed.model is not None:
            self.require_model(parsed.model)
        if parsed.stream is False:
            _refuse("stream: this route answers with an event stream", "stream")
        return self._finish(parsed, parsed.turns, AnswerForm.NAMED_EVENTS)

    def require_model(self, name: str) -> None:
        """Raises MODEL_NOT_FOUND."""
        if name not in self._names:
            shown = name[:_MAX_NAME_CHARS]
            raise ServingError(ErrorCode.MODEL_NOT_FOUND, f"the model '{shown}' does not exist", param="model")

    def _finish(self, body: GenerationBody, messages: list[Message], form: AnswerForm) -> Intake:
        refuse_unsupported_messages(messages)
        if body.stream_options is not None and form is AnswerForm.WHOLE:
            _refuse("stream_options: only with stream", "stream_options")
        if body.resumable:
            _require_resumable(form, body.num_choices)
        max_tokens = body.chosen_max_tokens
        sampling = _sampling(body, self._tokenizer.vocab_size)
        prompt_ids = self._tokenizer.render(
            [ChatMessage(role=message.role, content=message.content) for message in messages]
        )
        if not prompt_ids:
            _refuse("messages: the prompt is empty", "messages")
        window = self._tokenizer.window
        _require_room(window, len(prompt_ids), max_tokens)
        intake = Intake(
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            sampling=sampling,
            kv_salt=_kv_salt(body.cache_salt),
            ignore_eos=bool(body.ignore_eos),
            has_stop_strings=bool(body.stop),
            text=self._text(prompt_ids, body.stop, sampling),
            form=form,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            num_ignored_fields=body.num_ignored_fields(messages),
            window=window,
            stop=tuple(body.stop),
            is_resumable=bool(body.resumable),
            timeout_s=body.timeout,
            eos_ids=self._tokenizer.eos_ids,
        )
        if body.num_choices == 1:
            return intake
        children = [
            replace(
                intake,
                sampling=replace(sampling, seed=child_seed(sampling.seed, choice)),
                text=self._text(prompt_ids, body.stop, sampling),
                choice=choice,
            )
            for choice in range(body.num_choices)
        ]
        return replace(intake, children=tuple(children))

    def revive(self, spec: RequestSpec, *, form: AnswerForm, include_usage: bool, stop: Sequence[str]) -> Intake:
        """Of a resumable request that was taken in before, here or at another gateway."""
        return Intake(
            prompt_ids=spec.prompt_ids,
            max_tokens=spec.max_tokens,
            sampling=spec.sampling,
            kv_salt=spec.kv_salt,
            ignore_eos=spec.ignore_eos,
            has_stop_strings=spec.has_stop_strings,
            text=self._text(spec.prompt_ids, stop, spec.sampling),
            form=form,
            include_usage=include_usage,
            num_ignored_fields=0,
            window=self._tokenizer.window,
            stop=tuple(stop),
            is_resumable=True,
            eos_ids=self._tokenizer.eos_ids,
        )

    def _text(self, prompt_ids: tuple[TokenId, ...], stop: Sequence[str], sampling: SamplingParams) -> AnswerText:
        detokenizer = self._tokenizer.detokenizer(prompt_ids, stop)
        return AnswerText(detokenizer, sampling=sampling, token_name=self._tokenizer.token_name)


def parse_object(body: bytes | bytearray) -> dict[str, Any]:
    """JSON text in UTF-8 whose top is an object. Raises INVALID_REQUEST."""
    try:
        value: object = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except RecursionError:
        _refuse("the body is nested too deeply")
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        at = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        _refuse(f"the body is not valid JSON{at}")
    if not isinstance(value, dict):
        _refuse("the body must be a JSON object")
    return cast("dict[str, Any]", value)


def resumable_if_asked(intake: Intake, headers: Mapping[str, str]) -> Intake:
    """`X-Resumable: 1` does what `resumable` in the body does. Raises INVALID_REQUEST."""
    if headers.get("x-resumable") != "1" or intake.is_resumable:
        return intake
    _require_resumable(intake.form, len(intake.children) or 1)
    return replace(intake, is_resumable=True)


def accepts_event_stream(headers: Mapping[str, str]) -> bool:
    """Is `text/event-stream` itself in Accept, and not ruled out by q=0? `*/*` is no wish for events."""
    for wish in headers.get("accept", "").lower().split(","):
        media_type, *params = (part.strip() for part in wish.split(";"))
        if media_type == "text/event-stream":
            return not any(param.replace(" ", "") in ("q=0", "q=0.0", "q=0.00", "q=0.000") for param in params)
    return False


def _require_resumable(form: AnswerForm, num_choices: int) -> None:
    if form is AnswerForm.WHOLE:
        _refuse("resumable: only with stream", "resumable")
    if num_choices != 1:
        _refuse("resumable: only for one answer (n = 1)", "resumable")


def _require_room(window: int, num_prompt_tokens: int, max_tokens: int | None) -> None:
    """At least one token must fit; with `max_tokens` all of them. Raises CONTEXT_TOO_LONG."""
    if num_prompt_tokens + (max_tokens or 1) <= window:
        return
    asked = "" if max_tokens is None else f" and {max_tokens} tokens of answer were asked for"
    raise ServingError(
        ErrorCode.CONTEXT_TOO_LONG,
        f"the window of this model is {window} tokens; the prompt has {num_prompt_tokens}{asked}",
        param="messages" if num_prompt_tokens >= window else "max_tokens",
    )


def _sampling(body: GenerationBody, vocab_size: int) -> SamplingParams:
    # A negative seed counts as the unsigned number with the same 64 bits.
    seed = secrets.randbits(64) if body.seed is None else body.seed & MAX_SEED
    return SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=_stop_token_ids(body.stop_token_ids or [], vocab_size),
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        seed=seed,
    )


def _logit_bias(biases: Mapping[str, float], vocab_size: int) -> tuple[tuple[TokenId, float], ...]:
    """In order of the ids. JSON's keys are texts: each must be an id of the vocabulary, without signs and zeros."""
    by_id: dict[TokenId, float] = {}
    for key, bias in biases.items():
        is_number = key.isascii() and key.isdecimal() and len(key) <= _MAX_ID_DIGITS
        if not is_number or str(int(key)) != key or int(key) >= vocab_size:
            _refuse(f"logit_bias: {key[:_MAX_NAME_CHARS]!r} is no token id below {vocab_size}", "logit_bias")
        by_id[TokenId(int(key))] = bias
    return tuple(sorted(by_id.items()))


def _stop_token_ids(token_ids: Sequence[int], vocab_size: int) -> tuple[TokenId, ...]:
    """Without repeats."""
    for place, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            _refuse(f"stop_token_ids[{place}]: there is no such token id below {vocab_size}", "stop_token_ids")
    return tuple(dict.fromkeys(map(TokenId, token_ids)))


def _kv_salt(cache_salt: str | None) -> int:
    """Requests share cached KV with those of the same salt alone, and those without one with each other."""
    return 0 if cache_salt is None else int.from_bytes(blake2b(cache_salt.encode(), digest_size=8).digest(), "little")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse(message: str, param: str | None = None) -> NoReturn:
    raise ServingError(ErrorCode.INVALID_REQUEST, message, param=param)
