"""A Hugging Face model folder, rewritten into the files of a prepared folder. Loads torch."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from shared.domain.ids import TokenId
from shared.model.config import ModelConfig
from shared.model.prepared import PreparationError


def rewrite_hf(source: Path, folder: Path, report: Callable[[str], None]) -> tuple[int, frozenset[TokenId]]:
    """Write config, tokenizer, chat template and float32 weights into `folder`; returns window and end-of-answer ids.

    Raises PreparationError, one sentence, when something is missing, damaged or not supported.
    """
    fields = _read_object(source / "config.json")
    try:
        config = ModelConfig.from_hf(fields)
    except PreparationError as error:
        raise PreparationError(f"{source}: {error}") from None
    generation = source / "generation_config.json"
    eos = (_read_object(generation) if generation.exists() else {}).get("eos_token_id", fields.get("eos_token_id"))
    if eos is None:
        raise PreparationError(f"{source}: neither config.json nor generation_config.json names an eos_token_id")

    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    report("reading the tokenizer")
    try:
        tokenizer = cast("Any", AutoTokenizer).from_pretrained(str(source), local_files_only=True, use_fast=True)
    except (OSError, ValueError, KeyError, TypeError):
        raise PreparationError(f"{source}: its tokenizer is missing or damaged") from None
    if not getattr(tokenizer, "is_fast", False):
        raise PreparationError(f"{source}: its tokenizer has no tokenizer.json form")
    if not tokenizer.chat_template:
        raise PreparationError(f"{source}: it has no chat template, so it cannot hold a conversation")
    report("reading the weights")
    try:
        model, loading = cast("Any", AutoModelForCausalLM).from_pretrained(
            str(source), dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError):
        raise PreparationError(f"{source}: its weights are missing or damaged") from None
    missing = sorted(loading["missing_keys"])
    if missing:  # the library would fill them with random numbers
        raise PreparationError(f"{source}: weight {missing[0]} is missing")
    report("writing tokenizer and weights")
    tokenizer.save_pretrained(str(folder))
    model.save_pretrained(str(folder), max_shard_size="1000GB")  # one file, whatever the size
    eos_ids = cast("list[int]", eos if isinstance(eos, list) else [eos])
    return config.window, frozenset(TokenId(int(each)) for each in eos_ids)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise PreparationError(f"{path.parent} has no readable {path.name}") from None
    except ValueError:
        raise PreparationError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(value, dict):
        raise PreparationError(f"{path} is damaged: it is not a JSON object")
    return cast("dict[str, Any]", value)
