"""What each numeric mode and each type of cache loses on the default model, against float32: the table of
docs/performance.md. Minutes on an idle machine, most of them bf16's; `--only q4a16 q4a16/float16` for some of it.

On a fixed English and a fixed Japanese text: mean KL divergence of the next token's distribution, how often its likeliest
token is the same, perplexity. On 20 prompts of 48 tokens: greedy answers that are the same throughout, and how long they
are the same. Perplexity hardly sees what the others do. Ends with exit code 1 where the default mode's KL is above 1e-5.

Float32 is the cpu backend's, whose greedy answers are those of transformers (tests/integration/test_oracle_model.py).
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerFast

from cli.main import DEFAULT_HOME
from shared.kv.memory import KvMemory
from shared.model.kernels.cpu.model import CpuModel
from shared.model.model import Model, Segment
from shared.model.numerics import NumericMode
from shared.model.prepare import prepare_mode
from shared.model.prepared import PreparedModel
from tests.support.greedy import BLOCK_SIZE, greedy_answers
from tests.support.oracle import questions
from tests.support.reference import Reference, default_model_dir

MAX_DEFAULT_KL = 1e-5
NUM_PROMPTS, NUM_TOKENS = 20, 48
CHUNK = 64
TEXTS = Path(__file__).parent / "texts"
NARROW_CACHES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A mode with a type of cache; as text `mode/cache`, a float32 cache may be left out."""

    mode: NumericMode
    kv_dtype: str = "float32"

    @staticmethod
    def of(text: str) -> "Case":
        """Raises ValueError for a mode or type that there is not."""
        mode, _, kv_dtype = text.partition("/")
        if kv_dtype not in ("", "float32", *NARROW_CACHES):
            raise ValueError(kv_dtype)
        return Case(mode=NumericMode(mode), kv_dtype=kv_dtype or "float32")


def all_cases(default: NumericMode) -> list[Case]:
    """Every mode with a float32 cache, then float32 and the default mode with the narrow ones; the slowest last."""
    fast = [Case(mode=mode) for mode in NumericMode if mode is not NumericMode.BF16]
    narrow = [Case(mode=mode, kv_dtype=kv_dtype) for mode in (NumericMode.F32, default) for kv_dtype in NARROW_CACHES]
    return [*fast, *narrow, Case(mode=NumericMode.BF16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Of one mode on one text, means over its positions."""

    kl: float
    top1: float
    perplexity: float


def main() -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="What each numeric mode loses against float32.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", type=Case.of, default=[], help="such as q4a16 or f32/float16")
    options = parser.parse_args()
    prepared = PreparedModel.load(default_model_dir())
    tokenizer: Any = cast("Any", PreTrainedTokenizerFast).from_pretrained(str(prepared.folder), local_files_only=True)
    texts = {path.stem: _ids(tokenizer, path) for path in sorted(TEXTS.glob("*.txt"))}
    prompts = [Reference.shared().prompt_ids(question.messages) for question in questions()][:NUM_PROMPTS]
    print(", ".join(f"{name}: {len(ids)} tokens" for name, ids in texts.items()), f"; {len(prompts)} prompts")

    cases: list[Case] = options.only or all_cases(prepared.default_mode)
    progress = _Progress(len(cases))
    exact = _load(prepared, NumericMode.F32, options.threads)
    expected = greedy_answers(exact, prompts, NUM_TOKENS)
    print("| mode | cache | KL | top-1 | perplexity all / en / ja | greedy answers the same | same tokens of 48 |")
    print("|---|---|---|---|---|---|---|", flush=True)
    default_kl = 0.0
    for case in cases:
        mode, kv_dtype = case.mode, case.kv_dtype
        progress.begin(f"{mode} with a {kv_dtype} cache")
        model = _load(prepared, mode, options.threads)
        losses = {name: list(_losses(exact, model, ids, kv_dtype, progress)) for name, ids in texts.items()}
        progress.say("greedy answers")
        answers = greedy_answers(model, prompts, NUM_TOKENS, kv_dtype=kv_dtype)
        same = [
            len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True))))
            for a, b in zip(expected, answers, strict=True)
        ]
        whole = _mean([each for parts in losses.values() for each in parts])
        by_text = [_mean(losses[name]).perplexity for name in ("english", "japanese")]
        progress.clear()
        print(
            f"| {mode} | {kv_dtype} | {whole.kl:.1e} | {whole.top1:.4f} "
            f"| {whole.perplexity:.4f} / {by_text[0]:.4f} / {by_text[1]:.4f} "
            f"| {sum(each == NUM_TOKENS for each in same)} of {len(same)} | {sum(same) / len(same):.1f} |",
            flush=True,
        )
        if case == Case(mode=prepared.default_mode):
            default_kl = whole.kl
    if default_kl > MAX_DEFAULT_KL:
        print(f"the default mode, {prepared.default_mode}, has a KL of {default_kl:.1e}, allowed {MAX_DEFAULT_KL:.0e}")
        return 1
    return 0


class _Progress:
    """What is being measured, on stderr: one line that is written over, where that is a terminal; else a line a case."""

    def __init__(self, num_cases: int) -> None:
        self._num_cases = num_cases
        self._num_begun = 0
        self._title = ""
        self._is_terminal = sys.stderr.isatty()

    def begin(self, title: str) -> None:
        """The next case."""
        self._num_begun += 1
        self._title = f"{self._num_begun} of {self._num_cases}: {title}"
        print(self._title, end="" if self._is_terminal else "\n", file=sys.stderr, flush=True)

    def say(self, what: str) -> None:
        """How far it is."""
        if self._is_terminal:
            print(f"\r\033[K{self._title}, {what}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """The line is free for a result."""
        if self._is_terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _ids(tokenizer: Any, path: Path) -> list[int]:
    return tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]


def _load(prepared: PreparedModel, mode: NumericMode, num_threads: int) -> Model:
    if mode is NumericMode.BF16:
        from shared.model.torch_model import TorchModel

        return TorchModel.load(prepared, mode, num_threads=num_threads)
    prepare_mode(prepared, mode, DEFAULT_HOME.expanduser(), lambda line: print(line, file=sys.stderr))
    return CpuModel.load(prepared, mode, num_threads)


def _losses(
    exact: Model, model: Model, ids: Sequence[int], kv_dtype: str, progress: _Progress
) -> Iterator[tuple[float, bool, float]]:
    """KL, whether the likeliest token is the same, and the next token's negative log probability, by position."""
    steps = [_stepper(each, len(ids), dtype) for each, dtype in ((exact, "float32"), (model, kv_dtype))]
    for start in range(0, len(ids) - 1, CHUNK):
        end = min(start + CHUNK, len(ids) - 1)
        progress.say(f"text at token {start} of {len(ids)}")
        expected, ours = (_log_softmax(step(ids, start, end)) for step in steps)
        kl = (np.exp(expected) * (expected - ours)).sum(axis=1)
        top1 = expected.argmax(axis=1) == ours.argmax(axis=1)
        nll = -ours[np.arange(end - start), ids[start + 1 : end + 1]]
        yield from zip(kl.tolist(), top1.tolist(), nll.tolist(), strict=True)


def _stepper(
    model: Model, num_tokens: int, kv_dtype: str
) -> Callable[[Sequence[int], int, int], npt.NDArray[np.float32]]:
    """Computes positions [start, end) of a text and gives the logits of each: every token is a segment of its own."""
    layout = model.layout(BLOCK_SIZE, kv_dtype)
    table = np.arange(layout.num_blocks_for(num_tokens))
    memory = KvMemory(layout, len(table))

    def step(ids: Sequence[int], start: int, end: int) -> npt.NDArray[np.float32]:
        places = range(start, end)
        return model.forward(
            memory,
            [Segment(token_ids=[ids[at]], start=at, block_table=table, want_logits=True) for at in places],
        )

    return step


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def _mean(parts: Sequence[tuple[float, bool, float]]) -> Loss:
    kl, top1, nll = np.array(parts, dtype=np.float64).mean(axis=0)
    return Loss(kl=float(kl), top1=float(top1), perplexity=float(np.exp(nll)))


if __name__ == "__main__":
    sys.exit(main())
