"""Bodies: what is taken, what is refused and by which name. The text of a prompt is no matter here."""

import re
from typing import Any

import pytest

from gateway.schemas import ChatBody, CompletionBody, refuse_unsupported_messages
from shared.domain.errors import ErrorCode, ServingError

USER = {"role": "user", "content": "hi"}


def body(**fields: Any) -> dict[str, Any]:
    """A valid body with these fields on top."""
    return {"model": "m", "messages": [USER], **fields}


def check(fields: dict[str, Any]) -> None:
    """All that is checked before the prompt is looked at."""
    parsed = CompletionBody.parse(fields)
    refuse_unsupported_messages(parsed.messages)
    _ = parsed.chosen_max_tokens


def refusal(fields: dict[str, Any]) -> ServingError:
    """What parsing raises."""
    with pytest.raises(ServingError) as caught:
        check(fields)
    assert ErrorCode.INVALID_REQUEST == caught.value.code
    return caught.value


def test_text_parts_are_joined_by_a_newline() -> None:
    """TPL-02: no bracket, quote or key name gets into the prompt."""
    parts = [{"type": "text", "text": "alpha"}, {"type": "text", "text": "beta"}]
    parsed = CompletionBody.parse(body(messages=[{"role": "user", "content": parts}]))

    assert "alpha\nbeta" == parsed.messages[0].content


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
    ({"messages": [{**USER, "tool_calls": [{}]}]}, "messages[0].tool_calls"),
    ({"model": None}, "model"),
    ({"model": 3}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"stream": 1}, "stream"),
    ({"stream_options": True}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "0.5"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -1}, "top_k"),
    ({"top_k": 2**32}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"seed": 2**64}, "seed"),
    ({"seed": -(2**63) - 1}, "seed"),
    ({"seed": 10**400}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"stop": ""}, "stop[0]"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [7]}, "stop[0]"),
    ({"stop": {"a": 1}}, "stop"),
    ({"stop": "\udfff"}, "stop[0]"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 5.5}, "max_tokens"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
    ({"ignore_eos": "no"}, "ignore_eos"),
    ({"n": 0}, "n"),
    ({"n": 9}, "n"),
    ({"n": 1.5}, "n"),
    ({"best_of": 2}, "best_of"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": "1"}, "best_of"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"functions": [{}]}, "functions"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"logprobs": 5}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
    ({"logit_bias": {"1": 500}}, "logit_bias.1"),
    ({"logit_bias": {"1": -100.5}}, "logit_bias.1"),
    ({"logit_bias": {"1": "5"}}, "logit_bias.1"),
    ({"logit_bias": {"1": True}}, "logit_bias.1"),
    ({"logit_bias": [[1, 5]]}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(301)}}, "logit_bias"),
    ({"presence_penalty": 2.1}, "presence_penalty"),
    ({"frequency_penalty": -2.1}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": -1}, "repetition_penalty"),
    ({"repetition_penalty": float("inf")}, "repetition_penalty"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.1}, "min_p"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 2**32}, "min_tokens"),
    ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
    ({"min_tokens": 6, "max_completion_tokens": 5}, "min_tokens"),
    ({"stop_token_ids": 7}, "stop_token_ids"),
    ({"stop_token_ids": [7.5]}, "stop_token_ids[0]"),
    ({"stop_token_ids": [7, True]}, "stop_token_ids[1]"),
    ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
    ({"audio": {"voice": "a"}}, "audio"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"timeout": 0}, "timeout"),
    ({"resumable": 1}, "resumable"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG)
def test_what_is_wrong_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    """ERR-02 and decisions §8: a 400 whose message names the field, and whose param is it."""
    error = refusal(body(**fields))

    assert param == error.param
    assert re.split(r"[.\[]", param)[0] in error.message


BOOLEANS = ("stream", "ignore_eos", "logprobs", "echo", "resumable")
NUMBERS = (
    *("temperature", "top_p", "top_k", "seed", "max_tokens", "max_completion_tokens", "n", "best_of"),
    *("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p", "min_tokens", "top_logprobs"),
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in BOOLEANS for value in (0, 1, 0.0, 1.0)),
        *((name, value) for name in NUMBERS for value in (False, True)),
    ],
)
def test_booleans_are_no_numbers_and_numbers_no_booleans(name: str, value: float) -> None:
    """Although Python holds True for 1 and False for 0; also where the value would ask for nothing."""
    error = refusal(body(**{name: value}))

    assert name == error.param
    assert name in error.message


def test_a_key_that_is_no_text_is_refused() -> None:
    """Half of a surrogate pair in the name of a field: there is no name to give back."""
    error = refusal({**body(), "\ud800": 1})

    assert None is error.param
    assert error.message.startswith("body: ")


def test_a_long_key_is_cut() -> None:
    """A client's own text is not given back whole."""
    assert f"logit_bias.{'k' * 64}" == refusal(body(logit_bias={"k" * 100_000: 500})).param


def test_the_refusal_of_n_says_what_is_allowed() -> None:
    """One to eight answers."""
    assert "n: Input should be less than or equal to 8" == refusal(body(n=9)).message


@pytest.mark.parametrize(("n", "best_of", "expected"), [(None, None, 1), (1, 1, 1), (8, None, 8), (3, 3, 3)])
def test_best_of_is_n(n: int | None, best_of: int | None, expected: int) -> None:
    """Nothing is chosen from more answers than are given."""
    assert expected == CompletionBody.parse(body(n=n, best_of=best_of)).num_choices


def test_chat_gives_one_answer() -> None:
    """Its events have no number."""
    assert 1 == ChatBody.parse({"message": "hi", "n": 1}).num_choices
    with pytest.raises(ServingError) as caught:
        ChatBody.parse({"message": "hi", "n": 2})

    assert "n" == caught.value.param


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "tools": [], "tool_choice": "auto", "response_format": {"type": "text"}, "logprobs": False},
        {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0, "min_p": None, "modalities": ["text"]},
        dict.fromkeys(("stream", "stream_options", "temperature", "top_p", "top_k", "seed", "stop")),
        dict.fromkeys(("max_tokens", "max_completion_tokens", "ignore_eos", "n", "tools", "audio")),
        {"stop": []},
        {"max_tokens": 4, "max_completion_tokens": 4},
        {"temperature": 0, "top_p": 1, "seed": -(2**63)},
        {"temperature": 2, "seed": 2**64 - 1},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1e-9, "min_p": 1, "min_tokens": 5},
        {"logit_bias": {str(token): 100 for token in range(300)}, "stop_token_ids": list(range(128))},
        {"logprobs": True, "top_logprobs": 20, "n": 8, "best_of": 8, "min_tokens": 5, "max_tokens": 5},
        {"logprobs": False, "top_logprobs": 0},
        dict.fromkeys(("min_p", "min_tokens", "logit_bias", "stop_token_ids", "logprobs", "top_logprobs", "best_of")),
        dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty")),
    ],
)
def test_what_asks_for_nothing_is_taken(fields: dict[str, Any]) -> None:
    """Values that every client library sends, and the ends of every range."""
    assert "m" == CompletionBody.parse(body(**fields)).model


@pytest.mark.parametrize(("stop", "expected"), [(None, []), ([], []), ("###", ["###"]), (["a"] * 16, ["a"] * 16)])
def test_stop_is_one_string_or_a_list(stop: object, expected: list[str]) -> None:
    """Null and the empty list count as absent."""
    assert expected == CompletionBody.parse(body(stop=stop)).stop


def test_either_name_of_max_tokens_counts() -> None:
    """The older one and the newer one."""
    assert 3 == CompletionBody.parse(body(max_tokens=3)).chosen_max_tokens
    assert 4 == CompletionBody.parse(body(max_completion_tokens=4)).chosen_max_tokens
    assert None is CompletionBody.parse(body()).chosen_max_tokens


def test_ignored_fields_are_counted_wherever_they_stand() -> None:
    """Harmless and unknown ones alike: of the body, the stream options and each message."""
    parsed = CompletionBody.parse(
        body(
            user="u",
            whatever={"deep": [1]},
            stream_options={"include_obfuscation": False},
            messages=[{**USER, "name": "n"}, USER],
        )
    )

    assert 4 == parsed.num_ignored_fields(parsed.messages)


def test_chat_takes_messages_or_one_message() -> None:
    """Exactly one of the two."""
    assert ["hi"] == [turn.content for turn in ChatBody.parse({"message": "hi"}).turns]
    assert ["hi"] == [turn.content for turn in ChatBody.parse({"messages": [USER]}).turns]


@pytest.mark.parametrize("fields", [{}, {"message": "a", "messages": [USER]}, {"messages": []}, {"message": 3}])
def test_chat_refuses_neither_and_both(fields: dict[str, Any]) -> None:
    """And a message that is no text."""
    with pytest.raises(ServingError) as caught:
        _ = ChatBody.parse(fields).turns

    assert ErrorCode.INVALID_REQUEST == caught.value.code
    assert caught.value.param in ("message", "messages")
