"""What is asked in one run under fault, by whom, and what becomes of the askers: part of the schedule, so of the seed."""

import random
from dataclasses import dataclass
from enum import StrEnum

from tests.support.script import Piece, Script

REQUESTS_PER_S = 2.5
# So many long answers at once, now and then: together they need more blocks than the workers have.
CROWD = 14
CROWD_EVERY_S = 25.0
LONG_REPEAT = 50
# One character over two or three tokens, of each length that UTF-8 has: a lost or doubled token breaks it.
SPLIT_CHARACTERS: tuple[tuple[bytes, ...], ...] = (
    (b"\xc3", b"\xa9"),
    (b"\xe4\xba", b"\xac"),
    (b"\xf0\x9f", b"\x99", b"\x82"),
)
# What many prompts begin with: their blocks are shared and cached.
OPENINGS = ("It was a dark and stormy night; " * 4, "Call me what you like, but call me often. " * 3)
STALL_TIMEOUT_S = 6.0
"""What the gateways of a run wait for a reader that stands still."""


class Form(StrEnum):
    """How the answer is shown."""

    WHOLE = "whole"
    STREAM = "stream"
    RESUMABLE = "resumable"
    """Read on wherever the connection is cut."""
    RESUMABLE_EVENTS = "resumable events"
    """The same in the dialect of /api/chat."""


RESUMABLE_FORMS = (Form.RESUMABLE, Form.RESUMABLE_EVENTS)


class Fate(StrEnum):
    """What the client does after a while, if the answer has not ended by then."""

    READ = "read"
    LEAVE = "leave"
    LEAVE_AT_HEAD = "leave at the head"
    """When it has been taken, and before the first token."""
    DELETE = "delete"
    STALL = "stall"
    """It reads nothing for `pause_s`, and then on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request. `after_s` counts from when it is asked."""

    at_s: float
    number: int
    script: Script
    form: Form
    fate: Fate
    gateway: int = 0
    by_proxy: bool = False
    """Through the link that is cut and slowed."""
    after_s: float = 0.0
    pause_s: float = 0.0
    timeout_s: float | None = None
    num_choices: int = 1
    delete_at: int = 0
    """The gateway that is asked to delete."""
    drops_s: tuple[float, ...] = ()
    """A resumable one cuts its first connections itself, each after so long."""

    @property
    def is_resumable(self) -> bool:
        return self.form in RESUMABLE_FORMS

    def __str__(self) -> str:
        way = f"{'proxy' if self.by_proxy else 'direct'} to gateway-{self.gateway}"
        end = "" if self.fate is Fate.READ else f", {self.fate} after {self.after_s:.2f} s"
        end += f" at gateway-{self.delete_at}" if self.fate is Fate.DELETE else ""
        end += f" for {self.pause_s:.1f} s" if self.fate is Fate.STALL else ""
        end += (
            f", drops its connections after {', '.join(f'{each:.2f}' for each in self.drops_s)} s"
            if self.drops_s
            else ""
        )
        more = f", {self.num_choices} choices" if self.num_choices > 1 else ""
        more += f", timeout {self.timeout_s:.2f} s" if self.timeout_s is not None else ""
        return (
            f"{self.at_s:7.2f} ask #{self.number} {self.form} {way}: {self.script.num_prompt_tokens} tokens in, "
            f"{self.script.num_pieces} out, {self.script.step_ms} ms a step{more}{end}"
        )


def questions(choose: random.Random, duration_s: float, load: float, *, num_gateways: int) -> list[Question]:
    """By time, their numbers still to be given."""
    found: list[Question] = []
    at_s = 0.0
    while at_s < duration_s:
        found.append(_question(choose, at_s, len(found), choose.randrange(num_gateways)))
        # In bursts: a queue, and blocks that run short, come of several at once.
        at_s += 0.0 if choose.random() < 0.4 else choose.expovariate(0.6 * REQUESTS_PER_S * load)
    num_crowds = 0 if load < 1.0 else int((duration_s + CROWD_EVERY_S / 2) / CROWD_EVERY_S)
    for number in range(num_crowds):
        begin_s = CROWD_EVERY_S * number + choose.uniform(2.0, CROWD_EVERY_S / 2)
        found += [
            _of_a_crowd(choose, begin_s, len(found) + member, choose.randrange(num_gateways)) for member in range(CROWD)
        ]
    return sorted(found, key=lambda question: question.at_s)


def _question(choose: random.Random, at_s: float, number: int, gateway: int) -> Question:
    fate = choose.choices(list(Fate), [8, 1, 1, 1, 1])[0]
    form = choose.choices(list(Form), [3, 6, 3, 3])[0]
    if fate in (Fate.LEAVE_AT_HEAD, Fate.STALL) or (fate is not Fate.READ and form is not Form.WHOLE):
        form = Form.STREAM
    script = _script(choose, number, repeat=choose.choice([5, 10, 20] if form in RESUMABLE_FORMS else [1, 2, 5, 10]))
    after_s, pause_s = 0.0, 0.0
    match fate:
        case Fate.READ:
            pass
        case Fate.LEAVE | Fate.DELETE:
            # Early ones hit the queue, the placing and the prompt; late ones the answer.
            after_s = choose.choice([0.02, 0.2, 2.0]) * choose.random()
        case Fate.LEAVE_AT_HEAD:
            script = _script(choose, number, repeat=1, prefill_ms=400)
        case Fate.STALL:
            script = _script(choose, number, repeat=LONG_REPEAT, num_words=30, step_ms=1)
            after_s = 0.3 * choose.random()
            # Some come back in time, some too late.
            pause_s = choose.choice([0.5 * STALL_TIMEOUT_S, 2.0 * STALL_TIMEOUT_S])
    return Question(
        at_s=at_s,
        number=number,
        script=script,
        form=form,
        fate=fate,
        gateway=gateway,
        by_proxy=choose.random() < (0.7 if form in RESUMABLE_FORMS else 0.3),
        after_s=after_s,
        pause_s=pause_s,
        timeout_s=choose.uniform(0.2, 4.0) if fate is Fate.READ and choose.random() < 0.12 else None,
        num_choices=2 if form is Form.WHOLE and fate is Fate.READ and choose.random() < 0.3 else 1,
        delete_at=choose.choice([gateway, 1 - gateway]),
        drops_s=tuple(choose.uniform(0.02, 1.5) for _ in range(choose.randrange(4))) if form in RESUMABLE_FORMS else (),
    )


def _of_a_crowd(choose: random.Random, at_s: float, number: int, gateway: int) -> Question:
    return Question(
        at_s=at_s + 0.2 * choose.random(),
        number=number,
        script=_script(choose, number, repeat=LONG_REPEAT, num_words=30, step_ms=1),
        form=Form.STREAM,
        gateway=gateway,
        by_proxy=choose.random() < 0.2,
        fate=Fate.READ,
    )


def _script(
    choose: random.Random,
    number: int,
    *,
    repeat: int,
    num_words: int | None = None,
    step_ms: int | None = None,
    prefill_ms: int | None = None,
) -> Script:
    """Words that name their request and their place, with characters that come in parts between them."""
    pieces: list[Piece] = [choose.choice(OPENINGS)] if choose.random() < 0.5 else []
    for place in range(num_words or choose.choice([4, 12, 30])):
        pieces.append(f"{number}.{place} ")
        if choose.random() < 0.3:
            pieces.extend(choose.choice(SPLIT_CHARACTERS))
    return Script(
        pieces=pieces,
        repeat=repeat,
        prefill_ms=prefill_ms or choose.choice([0, 0, 50, 400]),
        step_ms=step_ms or choose.choice([1, 5, 20]),
    )
