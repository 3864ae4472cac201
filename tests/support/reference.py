"""What `transformers` itself answers with the weights of a prepared folder: greedy `generate` in float32."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM

from cli.main import DEFAULT_HOME
from shared.domain.ids import TokenId
from shared.model.kernels.cpu.model import CpuModel
from shared.model.prepare import prepare
from shared.model.prepared import PreparedModel
from shared.text.chat import ChatMessage, ChatTokenizer
from tests.support.greedy import greedy_answers
from tests.support.torch_threads import one_torch_thread


@cache
def default_model_dir() -> Path:
    """The prepared folder of the default model, where `firsttoken up` keeps it too."""
    return prepare(None, DEFAULT_HOME.expanduser(), lambda line: print(line, flush=True))


def reference_answers(
    model_dir: Path, prompts: Sequence[Sequence[TokenId]], max_tokens: int, *, repetition_penalty: float = 1.0
) -> list[tuple[TokenId, ...]]:
    """Each prompt's greedy answer, an end token included; computed once a run for each prompt.

    Our own decoder guesses it, and one pass of transformers over the guess judges every token. The first that it would
    not have taken makes it generate the answer itself.
    """
    return [_answer(model_dir, tuple(prompt), max_tokens, repetition_penalty) for prompt in prompts]


def reference_logprobs(model_dir: Path, prompt: Sequence[TokenId], max_tokens: int, num_top: int) -> list[list[float]]:
    """Log probabilities of the likeliest tokens at each place of the greedy answer, likeliest first."""
    answer = _answer(model_dir, tuple(prompt), max_tokens, 1.0)
    with torch.inference_mode(), one_torch_thread():
        logits = _model(model_dir)(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    return cast("Any", torch.log_softmax(logits.double(), dim=-1).topk(num_top).values).tolist()


@cache
def _model(model_dir: Path) -> Any:
    return cast("Any", AutoModelForCausalLM).from_pretrained(str(model_dir), dtype=torch.float32).eval()


@cache
def _guessing_model(model_dir: Path) -> CpuModel:
    prepared = PreparedModel.load(model_dir)
    return CpuModel.load(prepared, prepared.default_mode, 1)


def _guessed(model_dir: Path, prompt: tuple[TokenId, ...], max_tokens: int) -> tuple[TokenId, ...] | None:
    """Our greedy answer, where it is transformers' too."""
    (guess,) = greedy_answers(_guessing_model(model_dir), [prompt], max_tokens)
    with torch.inference_mode(), one_torch_thread():
        logits = _model(model_dir)(torch.tensor([[*prompt, *guess[:-1]]])).logits[0, len(prompt) - 1 :]
    taken = cast("list[int]", logits.argmax(dim=-1).tolist())
    eos_ids = PreparedModel.load(model_dir).eos_ids
    end = next((index for index, token in enumerate(guess) if token in eos_ids), max_tokens - 1) + 1
    return tuple(TokenId(token) for token in guess[:end]) if guess[:end] == taken[:end] else None


@cache
def _answer(
    model_dir: Path, prompt: tuple[TokenId, ...], max_tokens: int, repetition_penalty: float
) -> tuple[TokenId, ...]:
    if repetition_penalty == 1.0 and (guessed := _guessed(model_dir, prompt, max_tokens)) is not None:
        return guessed
    ids = torch.tensor([prompt])
    with torch.inference_mode(), one_torch_thread():
        output = _model(model_dir).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            repetition_penalty=repetition_penalty,
            eos_token_id=sorted(PreparedModel.load(model_dir).eos_ids),
        )
    return tuple(output[0, len(prompt) :].tolist())


class Reference:
    """The default model's answers to conversations."""

    def __init__(self, model_dir: Path) -> None:
        self._model_dir = model_dir
        self._chat = ChatTokenizer.load(model_dir)

    @staticmethod
    @cache
    def shared() -> "Reference":
        """One for the whole run."""
        return Reference(default_model_dir())

    def prompt_ids(self, messages: Sequence[dict[str, str]]) -> tuple[TokenId, ...]:
        """The rendered conversation."""
        return self._chat.render([ChatMessage(role=each["role"], content=each["content"]) for each in messages])

    def greedy(
        self, messages: Sequence[dict[str, str]], max_tokens: int, *, repetition_penalty: float = 1.0
    ) -> tuple[str, int]:
        """The answer's text, by the tokenizer's own decoding, and its number of tokens, an end token included."""
        (answer,) = reference_answers(
            self._model_dir, [self.prompt_ids(messages)], max_tokens, repetition_penalty=repetition_penalty
        )
        detokenizer = self._chat.detokenizer(())
        return detokenizer.feed(answer).text + detokenizer.flush(), len(answer)
