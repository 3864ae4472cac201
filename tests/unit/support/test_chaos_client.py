"""What a client of a run under fault calls wrong."""

import pytest

from tests.support.chaos_client import Asked, End, Seen, check_place, judge_answer, text_of
from tests.support.chaos_load import Fate, Form, Question
from tests.support.resuming import ReadSoFar
from tests.support.script import Script

SCRIPT = Script(pieces=["a", b"\xf0\x9f", b"\x99", b"\x82", "b"])
QUESTION = Question(at_s=0.0, number=0, script=SCRIPT, form=Form.STREAM, fate=Fate.READ)
ASKED = Asked(
    body=SCRIPT.body(),
    text=SCRIPT.text(),
    finish_reason="stop",
    prompt_tokens=SCRIPT.num_prompt_tokens,
    completion_tokens=6,
    script=SCRIPT,
)


def judged(end: End, text: str, *, finish_reason: str = "stop", completion_tokens: int = 6) -> Seen:
    """One answer."""
    seen = Seen(number=0, client_request_id="x", asked_s=0.0, gateway=0, end=end)
    seen.record.deltas.append(text)
    seen.record.finish_reason = finish_reason
    seen.usage = {"prompt_tokens": SCRIPT.num_prompt_tokens, "completion_tokens": completion_tokens}
    judge_answer(seen, QUESTION, ASKED)
    return seen


@pytest.mark.parametrize(
    ("expected", "seen"),
    [
        (End.FINISHED, judged(End.FINISHED, "a🙂b")),
        (End.WRONG, judged(End.FINISHED, "a🙂")),
        (End.WRONG, judged(End.FINISHED, "a🙂bb")),
        (End.WRONG, judged(End.FINISHED, "a🙂b", finish_reason="length")),
        (End.WRONG, judged(End.FINISHED, "a🙂b", completion_tokens=7)),
        (End.CUT, judged(End.CUT, "a")),
        (End.FAILED, judged(End.FAILED, "a\ufffd")),
        (End.WRONG, judged(End.FAILED, "b")),
    ],
)
def test_a_finished_answer_is_whole_and_counted_and_another_its_beginning(expected: End, seen: Seen) -> None:
    """Cut inside a character it may end in one U+FFFD."""
    assert expected is seen.end


def test_a_character_is_there_with_its_last_token() -> None:
    """And with none before."""
    assert ["", "a", "a", "a", "a🙂", "a🙂b"] == [text_of(SCRIPT, number) for number in range(6)]


def test_an_id_names_the_token_up_to_which_the_text_goes() -> None:
    """One too low or too high is found."""
    check_place(ReadSoFar(request_id="x", text="a🙂", last_id=4), SCRIPT)
    for wrong in (3, 5):
        with pytest.raises(AssertionError, match=f"id {wrong} came with 2 characters"):
            check_place(ReadSoFar(request_id="x", text="a🙂", last_id=wrong), SCRIPT)
