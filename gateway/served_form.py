"""How an answer is shown: what a resumable one needs beside its question and tokens, to be shown again elsewhere."""

import json
from dataclasses import dataclass

from gateway.intake import AnswerForm, Intake, IntakeReader
from gateway.request_id import Identity
from gateway.sse import EventEncoder, NamedEventEncoder, OpenAiEncoder
from shared.domain.request import RequestSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedForm:
    """`created_unix_s` is when the answer began."""

    form: AnswerForm
    include_usage: bool
    stop: tuple[str, ...]
    created_unix_s: int
    choice: int | None = None

    @classmethod
    def of(cls, intake: Intake, created_unix_s: int) -> "ServedForm":
        return cls(
            form=intake.form,
            include_usage=intake.include_usage,
            stop=intake.stop,
            created_unix_s=created_unix_s,
            choice=intake.choice,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> "ServedForm":
        """Raises KeyError, TypeError or ValueError where another version wrote it."""
        fields = json.loads(data)
        return cls(
            form=AnswerForm(fields["form"]),
            include_usage=bool(fields["include_usage"]),
            stop=tuple(map(str, fields["stop"])),
            created_unix_s=int(fields["created_unix_s"]),
        )

    def to_bytes(self) -> bytes:
        """Of a resumable answer, of which there is one to a question."""
        fields = {
            "form": self.form.value,
            "include_usage": self.include_usage,
            "stop": self.stop,
            "created_unix_s": self.created_unix_s,
        }
        return json.dumps(fields).encode()

    def revive(self, reader: IntakeReader, spec: RequestSpec) -> Intake:
        """The question as it was, its text fresh."""
        return reader.revive(spec, form=self.form, include_usage=self.include_usage, stop=self.stop)

    def encoder(self, identity: Identity, model: str) -> EventEncoder:
        """Its dialect."""
        if self.form is AnswerForm.NAMED_EVENTS:
            return NamedEventEncoder(request_id=identity.request_id)
        return OpenAiEncoder(
            completion_id=identity.completion_id,
            model=model,
            created_unix_s=self.created_unix_s,
            include_usage=self.include_usage,
            choice=self.choice,
        )
