"""Questions to the default model and the answers that `transformers` gives to them: the first oracle of the project."""

from dataclasses import dataclass

from tests.support.reference import Reference

MAX_TOKENS = 24
BLOCK, CHUNK = 16, 64
MULTIPLES = (*(k * BLOCK for k in range(3, 7)), 2 * CHUNK, 3 * CHUNK, 4 * CHUNK)
BORDER_LENGTHS = tuple(sorted({multiple + offset for multiple in MULTIPLES for offset in (-1, 0, 1)}))

SHORT = (
    "Hi",
    "What is the capital of France?",
    "What is 2 + 2?",
    "Write a haiku about the sea.",
    "Why is the sky blue?",
    "List three fruits, one a line.",
    "Translate 'good morning' into Spanish.",
    "def fibonacci(n):",
    "Who wrote Hamlet? Answer in one sentence.",
    "🦊🌊🎉",
)
JAPANESE = (
    "日本の首都はどこですか。",
    "こんにちは。自己紹介をしてください。",
    "「川の流れは絶えずして」という文を英語に訳してください。",
    "春について俳句を一つ作ってください。",
    "次の数を足してください: 三、五、七。",
)
STORY = (
    "The old lighthouse keeper climbed the winding stairs every evening before sunset, carrying a lamp, a book and a "
    "small basket of bread. He had done so for forty years, through storms that shook the tower and calm nights when "
    "the sea lay flat as glass. Ships passed far out, their lights like slow stars, and he wrote down each one in a "
    "ledger bound in green cloth: name, hour, course and weather. On the last page of the ledger he kept a list of "
    "things that had surprised him, among them a swan that slept on the railing, a letter in a bottle from a girl in "
    "another country, and the morning when snow fell on the sea without a sound. "
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A conversation, and how many tokens its rendering must have, where that is the point."""

    messages: list[dict[str, str]]
    num_prompt_tokens: int | None = None


def questions() -> list[Question]:
    """Short, Japanese, long, and conversations of several turns."""
    texts = [*SHORT, *JAPANESE]
    texts += [STORY * copies + "\nSummarize the text above." for copies in (1, 3, 6)]
    single = [Question(messages=[{"role": "user", "content": text}]) for text in texts]
    turns = [
        [
            {"role": "system", "content": "You are a pirate."},
            {"role": "user", "content": "Introduce yourself."},
        ],
        [
            {"role": "user", "content": "My name is Ann."},
            {"role": "assistant", "content": "Hello Ann!"},
            {"role": "user", "content": "What is my name?"},
        ],
        [
            {"role": "system", "content": "短く答えてください。"},
            {"role": "user", "content": "一番高い山は？"},
            {"role": "assistant", "content": "富士山です。"},
            {"role": "user", "content": "What is its height?"},
        ],
    ]
    return [*single, *(Question(messages=messages) for messages in turns)]


def border_questions() -> list[Question]:
    """One question for each of BORDER_LENGTHS: the beginning of a story, cut so that its rendering has this length.

    Raises ValueError if no beginning has it.
    """
    reference = Reference.shared()
    found: dict[int, Question] = {}
    for end in range(1, 2 * len(STORY)):
        messages = [{"role": "user", "content": (STORY * 2)[:end]}]
        length = len(reference.prompt_ids(messages))
        if length in BORDER_LENGTHS and length not in found:
            found[length] = Question(messages=messages, num_prompt_tokens=length)
        if len(found) == len(BORDER_LENGTHS):
            return [found[length] for length in BORDER_LENGTHS]
    raise ValueError(f"no beginning renders to {set(BORDER_LENGTHS) - found.keys()} tokens")


def expected_answers(asked: list[Question]) -> list[tuple[str, int]]:
    """Text and number of tokens (the end token is one) of each greedy answer."""
    reference = Reference.shared()
    return [reference.greedy(question.messages, MAX_TOKENS) for question in asked]
