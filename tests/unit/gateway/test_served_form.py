"""How an answer is shown, as it travels from one gateway to the next."""

import pytest

from gateway.intake import AnswerForm, IntakeReader
from gateway.request_id import Identity
from gateway.served_form import ServedForm
from gateway.sse import NamedEventEncoder, OpenAiEncoder
from shared.domain.ids import RequestId
from shared.text.chat import ChatTokenizer

READER = IntakeReader(ChatTokenizer.scripted(), "m")
IDENTITY = Identity(request_id=RequestId("r"), client_request_id=None)
BODY = b"""{"model": "m", "messages": [{"role": "user", "content": "{\\"pieces\\": [\\"a\\"]}"}], "stream": true,
"stream_options": {"include_usage": true}, "stop": ["x", "\xc3\xa4"], "seed": 3, "max_tokens": 4, "resumable": true,
"logprobs": true, "cache_salt": "s", "ignore_eos": true}"""


def test_a_question_comes_back_as_it_was() -> None:
    """Spec and form are all that another gateway needs."""
    intake = READER.read_completion(BODY)
    spec = intake.spec(RequestId("r"), 0)
    served = ServedForm.from_bytes(ServedForm.of(intake, 17).to_bytes())
    revived = served.revive(READER, spec)
    assert (17, ("x", "ä")) == (served.created_unix_s, served.stop)
    assert spec == revived.spec(RequestId("r"), 99)
    assert (intake.form, True, intake.stop, True) == (
        revived.form, revived.include_usage, revived.stop, revived.is_resumable
    )  # fmt: skip
    fed = [(intake.text.feed(spec.prompt_ids[0]).text, revived.text.feed(spec.prompt_ids[0]).text)]
    assert all(first == second for first, second in fed)


@pytest.mark.parametrize(
    ("form", "encoder"), [(AnswerForm.CHUNKS, OpenAiEncoder), (AnswerForm.NAMED_EVENTS, NamedEventEncoder)]
)
def test_each_form_has_its_dialect(form: AnswerForm, encoder: type[object]) -> None:
    """Chunks for /v1, named events for /api/chat."""
    served = ServedForm(form=form, include_usage=False, stop=(), created_unix_s=1)
    assert isinstance(served.encoder(IDENTITY, "m"), encoder)


@pytest.mark.parametrize("data", [b"[]", b"{}", b"x", b'{"form": "odd"}'])
def test_another_versions_form_is_refused(data: bytes) -> None:
    """By one of the exceptions that it names."""
    with pytest.raises((KeyError, TypeError, ValueError)):
        ServedForm.from_bytes(data)
