"""From bytes to an intake."""

import json
import struct
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.intake import (
    AnswerForm,
    Intake,
    IntakeReader,
    accepts_event_stream,
    child_seed,
    parse_object,
    resumable_if_asked,
)
from gateway.request_id import new_request_id
from shared.codec.request import spec_from_wire, spec_to_wire
from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import TokenId
from shared.domain.sampling import SamplingParams
from shared.text.chat import ChatMessage, ChatTokenizer
from shared.text.detokenizer import Detokenizer

REQUEST_ID = new_request_id(1)


class BytesTokenizer(ChatTokenizer):
    """One token a byte of all contents, a window of 64."""

    window = 64
    eos_ids = frozenset({TokenId(0)})
    vocab_size = 256

    def render(self, messages: Sequence[ChatMessage]) -> tuple[TokenId, ...]:
        """The contents, one after the other."""
        if messages[0].role == "system":
            raise ServingError(ErrorCode.INVALID_REQUEST, "chat template: no system turns here", param="messages")
        return tuple(map(TokenId, "".join(message.content for message in messages).encode()))

    def detokenizer(self, prompt_ids: Sequence[TokenId], stop: Sequence[str] = ()) -> Detokenizer:
        """Bytes are bytes."""
        return Detokenizer(lambda token_id: bytes([token_id]), stop)


@pytest.fixture
def reader() -> IntakeReader:
    """Serves the model `m`."""
    return IntakeReader(BytesTokenizer(), "m")


def body(content: str = "hello", **fields: Any) -> bytes:
    """A valid body with these fields on top."""
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}], **fields}).encode()


def refusal(reader: IntakeReader, raw: bytes) -> ServingError:
    """What reading it raises."""
    with pytest.raises(ServingError) as caught:
        reader.read_completion(raw)
    return caught.value


def test_a_plain_question_gets_the_defaults(reader: IntakeReader) -> None:
    """Temperature 1, no cuts, whole answer, as many tokens as fit."""
    intake = reader.read_completion(body())

    assert tuple(b"hello") == intake.prompt_ids
    assert (1.0, 1.0, 0) == (intake.sampling.temperature, intake.sampling.top_p, intake.sampling.top_k)
    assert (None, AnswerForm.WHOLE, False, False) == (
        intake.max_tokens,
        intake.form,
        intake.ignore_eos,
        intake.has_stop_strings,
    )


def test_the_salt_of_the_cache_is_the_clients_choice(reader: IntakeReader) -> None:
    """The same for the same text, whatever the request; none is 0; other texts are other salts."""
    asked = [body(), body(cache_salt=None), *(body(cache_salt=text) for text in "aabc")]
    salts = [reader.read_completion(each).spec(new_request_id(number), 0).kv_salt for number, each in enumerate(asked)]

    assert [0, 0] == salts[:2]
    assert salts[2] == salts[3]
    assert 4 == len(set(salts))
    assert all(0 <= salt < 2**64 for salt in salts)


@pytest.mark.parametrize("salt", ["", 7, ["a"], "\ud800"])
def test_a_salt_that_is_no_text_is_refused(reader: IntakeReader, salt: object) -> None:
    """By name."""
    with pytest.raises(ServingError) as caught:
        reader.read_completion(body(cache_salt=salt))
    assert (ErrorCode.INVALID_REQUEST, "cache_salt") == (caught.value.code, caught.value.param)


def test_what_is_asked_arrives_in_the_spec(reader: IntakeReader) -> None:
    """Every field that workers know."""
    intake = reader.read_completion(
        body(temperature=0, top_p=0.5, top_k=7, seed=9, stop="x", max_tokens=3, ignore_eos=True, stream=True)
    )
    spec = intake.spec(REQUEST_ID, 0)

    assert (0.0, 0.5, 7, 9) == (spec.sampling.temperature, spec.sampling.top_p, spec.sampling.top_k, spec.sampling.seed)
    assert (REQUEST_ID, 3, True, True) == (spec.request_id, spec.max_tokens, spec.ignore_eos, spec.has_stop_strings)
    assert AnswerForm.CHUNKS is intake.form


@pytest.mark.parametrize(
    ("seed", "expected"), [(0, 0), (-1, 2**64 - 1), (-(2**63), 2**63), (2**63, 2**63), (2**64 - 1, 2**64 - 1)]
)
def test_a_seed_is_64_bits_whatever_its_sign(reader: IntakeReader, seed: int, expected: int) -> None:
    """A negative one counts as the unsigned number with the same bits."""
    assert expected == reader.read_completion(body(seed=seed)).sampling.seed


def test_without_a_seed_each_request_draws_one(reader: IntakeReader) -> None:
    """64 random bits: two alike would be a defect."""
    assert reader.read_completion(body()).sampling.seed != reader.read_completion(body()).sampling.seed


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"not json",
        b"[]",
        b'"x"',
        b"7",
        b"null",
        b"true",
        b'{"model": ',
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b"\xff\xfe{}",
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xef\xbb\xbf{}",
    ],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    """ERR-02: 400 with a sentence, never an exception of the parser's, however deep or long."""
    with pytest.raises(ServingError) as caught:
        parse_object(raw)

    assert ErrorCode.INVALID_REQUEST == caught.value.code
    assert caught.value.message.startswith("the body ")


def test_a_half_surrogate_is_refused(reader: IntakeReader) -> None:
    """It has no UTF-8 bytes, so it is no text."""
    raw = b'{"model": "m", "messages": [{"role": "user", "content": "a\\ud800b"}]}'

    assert "messages[0].content" == refusal(reader, raw).param


@pytest.mark.parametrize("model", ["m", "default"])
def test_the_model_has_an_alias(reader: IntakeReader, model: str) -> None:
    """`default` is whatever is served."""
    assert 5 == len(reader.read_completion(body(model=model)).prompt_ids)


def test_an_unknown_model_is_named_up_to_64_characters(reader: IntakeReader) -> None:
    """404, and no long text of a client's in a message."""
    error = refusal(reader, body(model="z" * 100))

    assert (ErrorCode.MODEL_NOT_FOUND, "model") == (error.code, error.param)
    assert f"the model '{'z' * 64}' does not exist" == error.message


@pytest.mark.parametrize("max_tokens", [None, 10])
@pytest.mark.parametrize("num_prompt", [64, 100])
def test_a_prompt_over_the_window_names_the_numbers(
    reader: IntakeReader, max_tokens: int | None, num_prompt: int
) -> None:
    """USE-01: window and prompt, what was asked for if anything was, nothing negative."""
    fields = {} if max_tokens is None else {"max_tokens": max_tokens}
    error = refusal(reader, body("x" * num_prompt, **fields))

    assert ErrorCode.CONTEXT_TOO_LONG == error.code
    assert "window of this model is 64 tokens" in error.message
    assert f"the prompt has {num_prompt}" in error.message
    assert (max_tokens is not None) == ("10 tokens of answer" in error.message)
    assert "-" not in error.message


def test_prompt_and_answer_together_must_fit(reader: IntakeReader) -> None:
    """Exactly the window fits, one more does not, and then it is max_tokens that is too much."""
    assert 4 == reader.read_completion(body("x" * 60, max_tokens=4)).max_tokens

    error = refusal(reader, body("x" * 60, max_tokens=5))
    assert (ErrorCode.CONTEXT_TOO_LONG, "max_tokens") == (error.code, error.param)


@pytest.mark.parametrize(
    ("num_prompt", "max_request_tokens", "expected"), [(60, 0, 4), (60, 1000, 4), (10, 16, 6), (60, 16, 1)]
)
def test_without_max_tokens_what_is_left_is_asked_for(
    reader: IntakeReader, num_prompt: int, max_request_tokens: int, expected: int
) -> None:
    """Of the window and of the largest pool; a prompt that fits no pool asks for one token, which never fits either."""
    intake = reader.read_completion(body("x" * num_prompt))

    assert expected == intake.spec(REQUEST_ID, max_request_tokens).max_tokens


def test_a_template_that_refuses_is_quoted(reader: IntakeReader) -> None:
    """ERR-03: the template's own words, as a 400."""
    raw = json.dumps({"model": "m", "messages": [{"role": "system", "content": "x"}]}).encode()
    error = refusal(reader, raw)

    assert (ErrorCode.INVALID_REQUEST, "chat template: no system turns here") == (error.code, error.message)


def test_an_empty_prompt_is_refused(reader: IntakeReader) -> None:
    """There is nothing to compute from."""
    assert "messages" == refusal(reader, body("")).param


def test_stream_options_need_a_stream(reader: IntakeReader) -> None:
    """As the original refuses it."""
    assert "stream_options" == refusal(reader, body(stream_options={"include_usage": True})).param
    assert reader.read_completion(body(stream=True, stream_options={"include_usage": True})).include_usage


def test_chat_gives_named_events(reader: IntakeReader) -> None:
    """The model may be left out; the fields mean the same."""
    intake = reader.read_chat(b'{"message": "hello", "max_tokens": 3}')

    assert (AnswerForm.NAMED_EVENTS, 3) == (intake.form, intake.max_tokens)
    assert tuple(b"hello") == intake.prompt_ids


def test_chat_cannot_be_asked_for_a_whole_answer(reader: IntakeReader) -> None:
    """The client would wait for something else than it gets."""
    with pytest.raises(ServingError) as caught:
        reader.read_chat(b'{"message": "hello", "stream": false}')

    assert "stream" == caught.value.param


def test_the_detokenizer_knows_the_stop_strings(reader: IntakeReader) -> None:
    """TXT-06: it is this side that finds them."""
    intake: Intake = reader.read_completion(body(stop=["##"]))
    parts = [intake.text.feed(TokenId(byte)) for byte in b"a##b"]

    assert [("a", False), ("", False), ("", True), ("", False)] == [(part.text, part.is_stop) for part in parts]


def test_all_of_sampling_arrives_in_the_spec(reader: IntakeReader) -> None:
    """SMP: each field under its name, for both routes, and behind the wire."""
    fields: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.75,
        "top_k": 3,
        "min_p": 0.125,
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "logit_bias": {"255": -100, "7": 2.5},
        "min_tokens": 2,
        "stop_token_ids": [9, 8, 9],
        "logprobs": True,
        "top_logprobs": 4,
        "seed": 11,
    }
    expected = SamplingParams(
        temperature=0.5,
        top_p=0.75,
        top_k=3,
        min_p=0.125,
        presence_penalty=1.0,
        frequency_penalty=-0.5,
        repetition_penalty=1.25,
        logit_bias=((TokenId(7), 2.5), (TokenId(255), -100.0)),
        min_tokens=2,
        stop_token_ids=(TokenId(9), TokenId(8)),
        top_logprobs=4,
        seed=11,
    )
    whole = reader.read_completion(body(**fields))
    chat = reader.read_chat(json.dumps({"message": "hello", **fields}).encode())

    assert expected == whole.sampling == chat.sampling
    assert expected == spec_from_wire(spec_to_wire(whole.spec(REQUEST_ID, 0))).sampling


@pytest.mark.parametrize(
    ("logprobs", "top_logprobs", "expected"), [(None, None, None), (False, 0, None), (True, None, 0), (True, 3, 3)]
)
def test_logprobs_alone_ask_for_the_chosen_tokens(
    reader: IntakeReader, logprobs: bool | None, top_logprobs: int | None, expected: int | None
) -> None:
    """And without them none are made."""
    intake = reader.read_completion(body(logprobs=logprobs, top_logprobs=top_logprobs))

    assert (expected, expected is not None) == (intake.sampling.top_logprobs, intake.has_logprobs)


@pytest.mark.parametrize("key", ["256", "-1", "word", "", "1.0", "+1", "01", "٣", "1" * 5000])
def test_smp_03_a_bias_of_no_token_is_named(reader: IntakeReader, key: str) -> None:
    """Beyond the vocabulary of 256, negative, no number, or not written as one; however long."""
    error = refusal(reader, body(logit_bias={"1": 1, key: 1}))

    assert (ErrorCode.INVALID_REQUEST, "logit_bias") == (error.code, error.param)
    assert f"logit_bias: {key[:64]!r} is no token id below 256" == error.message


@pytest.mark.parametrize("token_id", [-1, 256, 10**30])
def test_an_end_token_outside_the_vocabulary_is_refused(reader: IntakeReader, token_id: int) -> None:
    """By its place in the list."""
    error = refusal(reader, body(stop_token_ids=[3, token_id]))

    assert ("stop_token_ids", "stop_token_ids[1]: there is no such token id below 256") == (error.param, error.message)


def test_several_answers_are_children(reader: IntakeReader) -> None:
    """The same question with a text and a seed of its own each, numbered; one answer is no child."""
    intake = reader.read_completion(body(n=3, seed=5, temperature=0.5, stop="#"))
    first, second, third = intake.children
    first.text.feed(TokenId(ord("a")))

    assert [0, 1, 2] == [child.choice for child in intake.children]
    assert [child_seed(5, choice) for choice in range(3)] == [child.sampling.seed for child in intake.children]
    assert "b" == second.text.feed(TokenId(ord("b"))).text
    assert {(intake.prompt_ids, 0.5, True)} == {
        (child.prompt_ids, child.sampling.temperature, child.has_stop_strings) for child in (first, second, third)
    }
    assert () == reader.read_completion(body(n=1)).children


def test_seeds_of_children_are_those_of_the_decision() -> None:
    """The first 8 bytes of blake2b over seed and number, by hand."""
    for seed, choice in ((0, 0), (5, 1), (2**64 - 1, 7)):
        digest = blake2b(struct.pack("<QQ", seed, choice)).digest()
        assert struct.unpack("<Q", digest[:8])[0] == child_seed(seed, choice)
    assert 80 == len({child_seed(seed, choice) for seed in range(10) for choice in range(8)})


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("text/event-stream", True),
        ("application/json, Text/Event-Stream;q=0.5", True),
        ("text/event-stream; q=0", False),
        ("*/*", False),
        ("application/x-ndjson", False),
        ("", False),
    ],
)
def test_an_event_stream_must_be_named(accept: str, expected: bool) -> None:
    """`*/*` will mean lines of JSON one day."""
    assert expected == accepts_event_stream({"accept": accept})


# What a body can hold: all finite doubles, integers of any size, and the values at the edges of what a smaller float holds.
json_numbers = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False), st.integers(), st.sampled_from([5e-324, 1e-50, 1 - 2**-53, -0.0])
)


@given(
    temperature=st.one_of(st.floats(0, 2), json_numbers),
    top_p=st.one_of(st.floats(0, 1), json_numbers),
    top_k=st.integers(0, 2**32 - 1),
    seed=st.integers(-(2**63), 2**64 - 1),
)
def test_what_is_sampled_with_is_what_was_asked_for(temperature: float, top_p: float, top_k: int, seed: int) -> None:
    """A value is refused by its name, or is the same to the last bit behind the wire."""
    reader = IntakeReader(BytesTokenizer(), "m")
    raw = body("hello", temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    if not (0 <= temperature <= 2 and 0 < top_p <= 1):
        assert refusal(reader, raw).param in ("temperature", "top_p")
        return
    intake = reader.read_completion(raw)
    sampling = spec_from_wire(spec_to_wire(intake.spec(REQUEST_ID, 0))).sampling

    assert (temperature, top_p, top_k, seed % 2**64) == (
        sampling.temperature,
        sampling.top_p,
        sampling.top_k,
        sampling.seed,
    )


@pytest.mark.parametrize("asked_in", ["body", "header"])
def test_only_one_streamed_answer_can_be_resumable(reader: IntakeReader, asked_in: str) -> None:
    """Asked for in the body or by the header, which must say exactly 1."""
    headers = {"x-resumable": "1"} if asked_in == "header" else {}
    wish = {"resumable": True} if asked_in == "body" else {}

    def ask(**fields: Any) -> Intake:
        return resumable_if_asked(reader.read_completion(body(**wish, **fields)), headers)

    assert ask(stream=True).is_resumable
    for wrong in ({}, {"stream": True, "n": 2}):
        with pytest.raises(ServingError) as caught:
            ask(**wrong)
        assert (ErrorCode.INVALID_REQUEST, "resumable") == (caught.value.code, caught.value.param)
    plain = reader.read_completion(body(stream=True))
    assert not resumable_if_asked(plain, {"x-resumable": "0"}).is_resumable
