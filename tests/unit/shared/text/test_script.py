"""The scripted generator's script: its table of tokens, its output, and every way to refuse it."""

import json
from itertools import islice

import pytest

from shared.domain.errors import ErrorCode, ServingError
from shared.domain.ids import TokenId
from shared.text.script import SCRIPTED_EOS_ID, Script


def test_ids_follow_first_appearance_and_equal_bytes_share_one() -> None:
    """The same bytes, as text or as hex, are one piece; a one-byte piece is not the byte's own id."""
    script = Script.parse('{"pieces": ["a", "人", {"hex": "61"}, {"hex": "e4ba"}], "repeat": 2}')
    assert script.piece_table == (b"a", "人".encode(), b"\xe4\xba")
    assert script.piece_ids == (256, 257, 256, 258)
    assert list(islice(script.output_ids(), 10)) == [256, 257, 256, 258, 256, 257, 256, 258, *[SCRIPTED_EOS_ID] * 2]
    assert [script.token_bytes(TokenId(each)) for each in (65, 258, SCRIPTED_EOS_ID)] == [b"A", b"\xe4\xba", b""]


def test_without_eos_the_pieces_go_on() -> None:
    """With `eos` false the answer has no end of its own."""
    script = Script.parse(b'{"pieces": ["x", "y"], "eos": false}')
    assert list(islice(script.output_ids(), 5)) == [256, 257, 256, 257, 256]
    assert script.token_id(1_000_000) == 257


def test_all_fields_are_read() -> None:
    """Every field arrives; the prompt's bytes give the same script."""
    source = json.dumps(
        {"pieces": ["x"], "repeat": 3, "prefill_ms": 800, "step_ms": 2.5, "eos": False, "fail_at": 2}
    ).encode()
    script = Script.parse(source)
    assert (script.repeat, script.prefill_ms, script.step_ms, script.eos, script.fail_at) == (3, 800.0, 2.5, False, 2)
    assert Script.from_prompt([TokenId(each) for each in source]) == script


def test_an_empty_answer() -> None:
    """No piece at all is an answer that ends at once."""
    assert Script.parse('{"pieces": []}').token_id(1) == SCRIPTED_EOS_ID


@pytest.mark.parametrize(
    ("source", "part"),
    [
        (b"\xff", "not UTF-8"),
        ("hello", "not JSON"),
        ("[" * 100_000, "nesting too deep"),
        ("9" * 5000, "number too long"),
        ("[]", "must be a JSON object"),
        ("{}", "'pieces' is missing"),
        ('{"pieces": "x"}', "'pieces' must be a list"),
        ('{"pieces": ["x", 3]}', "pieces[1] must be a string"),
        ('{"pieces": [{"hex": "6"}]}', "pieces[0] has a 'hex'"),
        ('{"pieces": [{"hex": "61", "text": "a"}]}', "pieces[0] must be"),
        ('{"pieces": ["\\ud83d"]}', "half of a surrogate pair"),
        ('{"pieces": ["x"], "speed": 3}', "field 'speed' is not known"),
        ('{"pieces": ["x"], "repeat": -1}', "'repeat' must be"),
        ('{"pieces": ["x"], "repeat": true}', "'repeat' must be"),
        ('{"pieces": ["x"], "prefill_ms": NaN}', "'prefill_ms' must be"),
        ('{"pieces": ["x"], "step_ms": ' + "9" * 400 + "}", "'step_ms' must be"),
        ('{"pieces": ["x"], "step_ms": "1"}', "'step_ms' must be"),
        ('{"pieces": ["x"], "eos": 1}', "'eos' must be true or false"),
        ('{"pieces": [], "eos": false}', "must not be empty when 'eos' is false"),
        ('{"pieces": ["x"], "fail_at": 0}', "'fail_at' must be"),
    ],
)
def test_a_bad_script_is_refused_with_its_fault(source: bytes | str, part: str) -> None:
    """Each fault is an INVALID_REQUEST whose sentence names it."""
    with pytest.raises(ServingError) as caught:
        Script.parse(source)
    assert caught.value.code == ErrorCode.INVALID_REQUEST
    assert part in caught.value.message


def test_ids_outside_the_table_are_an_error() -> None:
    """A prompt of other ids, or an output id without a piece, is refused."""
    script = Script.parse('{"pieces": ["x"]}')
    with pytest.raises(ValueError, match="257"):
        script.token_bytes(TokenId(257))
    with pytest.raises(ServingError, match="not a byte"):
        Script.from_prompt([TokenId(300)])
