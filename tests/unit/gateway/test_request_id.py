"""Ids that we make, ids that we are given."""

import pytest

from gateway.request_id import MAX_CLIENT_ID_CHARS, key_hash, new_identity, new_request_id, parse_request_id
from shared.domain.errors import ErrorCode, ServingError


def test_ids_sort_by_time_and_differ() -> None:
    """A ULID: 26 characters, the first ten of them time."""
    early, late = new_request_id(1_700_000_000_000), new_request_id(1_700_000_000_001)

    assert 26 == len(early)
    assert early < late
    assert new_request_id(5) != new_request_id(5)


def test_the_time_of_the_standard_example_is_written_as_the_standard_does() -> None:
    """The ULID text of the time 1469918176385 begins with 01ARYZ6S41."""
    assert "01ARYZ6S41" == new_request_id(1_469_918_176_385)[:10]


def test_an_id_is_taken_with_and_without_its_prefix() -> None:
    """As the client saw it in the body or in the header."""
    request_id = new_request_id(1)

    assert request_id == parse_request_id(request_id)
    assert request_id == parse_request_id(f"chatcmpl-{request_id}")


def test_answers_to_one_question_share_its_name() -> None:
    """Each has an id of its own, and all call themselves by the question's; no client can name one of them."""
    question = new_identity({"x-request-id": "mine"}, 1)
    children = [question.child(choice) for choice in (0, 7)]

    assert [f"{question.request_id}.0", f"{question.request_id}.7"] == [child.request_id for child in children]
    assert {f"chatcmpl-{question.request_id}"} == {one.completion_id for one in (question, *children)}
    assert ["mine", "mine"] == [child.client_request_id for child in children]
    with pytest.raises(ServingError) as caught:
        parse_request_id(children[0].request_id)

    assert ErrorCode.REQUEST_NOT_FOUND is caught.value.code


@pytest.mark.parametrize("text", ["", "chatcmpl-"])
def test_an_empty_id_is_refused(text: str) -> None:
    """CAN-04: nothing can be matched by a prefix."""
    with pytest.raises(ServingError) as caught:
        parse_request_id(text)

    assert (ErrorCode.INVALID_REQUEST, "id") == (caught.value.code, caught.value.param)


@pytest.mark.parametrize("text", ["r-1", "x" * 26, "01ARYZ6S41" * 50, "\u0661" * 26, "../../v1/models"])
def test_what_cannot_be_an_id_is_unknown(text: str) -> None:
    """It never reaches the scheduler or Redis."""
    with pytest.raises(ServingError) as caught:
        parse_request_id(text)

    assert ErrorCode.REQUEST_NOT_FOUND == caught.value.code


def test_a_clients_id_is_echoed() -> None:
    """Beside our own, in its own header."""
    identity = new_identity({"x-request-id": "mine-1"}, 1)

    assert {"x-firsttoken-request": identity.request_id, "x-request-id": "mine-1"} == identity.headers


def test_without_a_clients_id_both_headers_carry_ours() -> None:
    """So that either can be logged by a client."""
    identity = new_identity({}, 1)

    assert {"x-firsttoken-request": identity.request_id, "x-request-id": identity.request_id} == identity.headers


def test_a_clients_id_is_made_safe_for_a_header() -> None:
    """Visible ASCII, bounded; nothing of it left counts as none."""
    wild = new_identity({"x-request-id": "a\r\nset-cookie: b\u2028" + "c" * 500}, 1)
    empty = new_identity({"x-request-id": " \t\u00e9"}, 1)

    assert "aset-cookie:b" + "c" * (MAX_CLIENT_ID_CHARS - 13) == wild.client_request_id
    assert None is empty.client_request_id


def test_whose_request_it_is_is_a_hash() -> None:
    """Of the whole header; nobody's is a value of its own, and none tells the key."""
    hashes = [key_hash(headers) for headers in ({}, {"authorization": "Bearer a"}, {"authorization": "Bearer b"})]

    assert (3, key_hash({"other": "x"})) == (len(set(hashes)), hashes[0])
    assert "Bearer" not in "".join(hashes)
