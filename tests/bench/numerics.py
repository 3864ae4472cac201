"""What each numeric mode loses on the default model, against float32: the table of docs/performance.md.

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
    parser.add_argument("--kv-dtype", default="float32", help="of the cache of the modes that are measured")
    parser.add_argument("--modes", nargs="+", default=list(NumericMode), help="bf16 is slow: only torch computes it")
    options = parser.parse_args()
    prepared = PreparedModel.load(default_model_dir())
    tokenizer: Any = cast("Any", PreTrainedTokenizerFast).from_pretrained(str(prepared.folder), local_files_only=True)
    texts = {path.stem: _ids(tokenizer, path) for path in sorted(TEXTS.glob("*.txt"))}
    prompts = [Reference.shared().prompt_ids(question.messages) for question in questions()][:NUM_PROMPTS]
    print(", ".join(f"{name}: {len(ids)} tokens" for name, ids in texts.items()), f"; {len(prompts)} prompts")

    exact = _load(prepared, NumericMode.F32, options.threads)
    expected = greedy_answers(exact, prompts, NUM_TOKENS)
    print("| mode | KL | top-1 | perplexity all / en / ja | greedy answers the same | same tokens of 48 |")
    print("|---|---|---|---|---|---|")
    default_kl = 0.0
    for mode in map(NumericMode, options.modes):
        model = _load(prepared, mode, options.threads)
        losses = {name: list(_losses(exact, model, ids, options.kv_dtype)) for name, ids in texts.items()}
        answers = greedy_answers(model, prompts, NUM_TOKENS, kv_dtype=options.kv_dtype)
        same = [
            len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=True))))
            for a, b in zip(expected, answers, strict=True)
        ]
        whole = _mean([each for parts in losses.values() for each in parts])
        by_text = [_mean(losses[name]).perplexity for name in ("english", "japanese")]
        print(
            f"| {mode} | {whole.kl:.1e} | {whole.top1:.4f} | {whole.perplexity:.4f} / {by_text[0]:.4f} / {by_text[1]:.4f} "
            f"| {sum(each == NUM_TOKENS for each in same)} of {len(same)} | {sum(same) / len(same):.1f} |",
            flush=True,
        )
        if mode is prepared.default_mode:
            default_kl = whole.kl
    if default_kl > MAX_DEFAULT_KL:
        print(f"the default mode, {prepared.default_mode}, has a KL of {default_kl:.1e}, allowed {MAX_DEFAULT_KL:.0e}")
        return 1
    return 0


def _ids(tokenizer: Any, path: Path) -> list[int]:
    return tokenizer(path.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"]


def _load(prepared: PreparedModel, mode: NumericMode, num_threads: int) -> Model:
    if mode is NumericMode.BF16:
        from shared.model.torch_model import TorchModel

        return TorchModel.load(prepared, mode, num_threads=num_threads)
    prepare_mode(prepared, mode, DEFAULT_HOME.expanduser(), lambda line: print(line, file=sys.stderr))
    return CpuModel.load(prepared, mode, num_threads)


def _losses(exact: Model, model: Model, ids: Sequence[int], kv_dtype: str) -> Iterator[tuple[float, bool, float]]:
    """KL, whether the likeliest token is the same, and the next token's negative log probability, by position."""
    steps = [_stepper(each, len(ids), dtype) for each, dtype in ((exact, "float32"), (model, kv_dtype))]
    for start in range(0, len(ids) - 1, CHUNK):
        end = min(start + CHUNK, len(ids) - 1)
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
