"""A Hugging Face model folder, rewritten into the files of a prepared folder. Loads torch, which reads every format."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from shared.domain.ids import TokenId
from shared.model.config import ModelConfig
from shared.model.prepared import WEIGHTS_FILE, PreparationError, SourceFacts
from shared.model.weights import check_weights, expected_shapes

INDEX_FILE = "model.safetensors.index.json"
# Older exports keep the table of rotary frequencies beside the weights; it follows from the config.
_IGNORED_SUFFIX = "rotary_emb.inv_freq"


def rewrite_hf(source: Path, folder: Path, report: Callable[[str], None]) -> SourceFacts:
    """Write config, tokenizer, chat template and float32 weights into `folder`.

    Raises PreparationError, one sentence, when something is missing, damaged or not supported.
    """
    fields = _read_object(source / "config.json")
    try:
        if fields.get("quantization_config"):
            raise PreparationError("weights that are quantised already are supported from GGUF only")
        config = ModelConfig.from_hf(fields)
        eos_ids = _eos_ids(source, fields)
        report("reading the tokenizer")
        _write_tokenizer(source, folder)
        report("reading the weights")
        _write_weights(source, config, folder, report)
    except PreparationError as error:
        raise PreparationError(f"{source}: {error}") from None
    kept = {name: value for name, value in fields.items() if name != "torch_dtype"} | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(kept, indent=2) + "\n", encoding="utf-8")
    return SourceFacts(window=config.window, eos_ids=eos_ids, has_4bit_groups=False)


def _eos_ids(source: Path, fields: dict[str, Any]) -> frozenset[TokenId]:
    generation = source / "generation_config.json"
    of_generation = _read_object(generation) if generation.exists() else {}
    eos = of_generation.get("eos_token_id", fields.get("eos_token_id"))
    if eos is None:
        raise PreparationError("neither config.json nor generation_config.json names an eos_token_id")
    try:
        return frozenset(TokenId(int(each)) for each in (cast("list[int]", eos) if isinstance(eos, list) else [eos]))
    except (TypeError, ValueError):
        raise PreparationError(f"its eos_token_id is no token id ({eos!r})") from None


def _write_tokenizer(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = cast("Any", AutoTokenizer).from_pretrained(str(source), local_files_only=True, use_fast=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise PreparationError("its tokenizer is missing or damaged") from None
    if not getattr(tokenizer, "is_fast", False):
        raise PreparationError("its tokenizer has no tokenizer.json form")
    if not tokenizer.chat_template:
        raise PreparationError("it has no chat template, so it cannot hold a conversation")
    tokenizer.save_pretrained(str(folder))


def _write_weights(source: Path, config: ModelConfig, folder: Path, report: Callable[[str], None]) -> None:
    """All shards into one float32 file."""
    import torch
    from safetensors import SafetensorError, safe_open
    from safetensors import torch as safetensors_torch

    weights: dict[str, torch.Tensor] = {}
    for path in _shards(source):
        try:
            with cast("Any", safe_open)(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    if not name.endswith(_IGNORED_SUFFIX):
                        weights[name] = file.get_tensor(name).to(torch.float32).contiguous()
        except (OSError, SafetensorError, RuntimeError):
            raise PreparationError(f"{path.name} is missing or damaged") from None
    check_weights(config, {name: tuple(value.shape) for name, value in weights.items()})
    for name, value in weights.items():
        if not torch.isfinite(value).all():
            raise PreparationError(f"weight {name} is damaged: it holds what is no number")
    report("writing the weights")
    kept = {name: weights[name] for name in expected_shapes(config)}
    cast("Any", safetensors_torch).save_file(kept, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def _shards(source: Path) -> list[Path]:
    """The one file, or those that the index names."""
    index = source / INDEX_FILE
    if not index.exists():
        if not (source / WEIGHTS_FILE).exists():
            raise PreparationError(f"its weights are missing: there is neither {WEIGHTS_FILE} nor {INDEX_FILE}")
        return [source / WEIGHTS_FILE]
    weight_map: object = _read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise PreparationError(f"{INDEX_FILE} is damaged: it has no weight_map")
    names = sorted({str(name) for name in cast("dict[str, object]", weight_map).values()})
    for name in names:
        if Path(name).name != name:
            raise PreparationError(f"{INDEX_FILE} is damaged: it names {name}")
        if not (source / name).is_file():
            raise PreparationError(f"{name} is missing, which {INDEX_FILE} names")
    return [source / name for name in names]


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
