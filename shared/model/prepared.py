"""A prepared model folder, as the services see it. Loads no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shared.domain.ids import TokenId
from shared.model.numerics import NumericMode, WeightFormat

PREPARE_VERSION = 2
"""Grows when preparation writes something else from the same source; older folders are then made anew."""
FACTS_FILE = "firsttoken.json"
WEIGHTS_FILE = "model.safetensors"
GROUPS_FILE = "groups.safetensors"


class PreparationError(Exception):
    """A model cannot be prepared or used; the message is one sentence for the person who asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """What reading a source gives beside the files. `has_4bit_groups`: all matrices of the layers are such groups."""

    window: int
    eos_ids: frozenset[TokenId]
    has_4bit_groups: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """What preparation found out. `source_hash` is the SHA-256 of the source's content, in hexadecimal digits.

    The folder holds config, tokenizer and chat template, the source's weights in float32 (`weights_path`), their
    groups if the source is quantised to 4 bits (`groups_path`), and packed for the `cpu` backend one file for each
    weight format that was asked for (`packed_path`).
    """

    folder: Path
    name: str
    window: int
    eos_ids: frozenset[TokenId]
    source_hash: str
    default_mode: NumericMode

    @property
    def weights_path(self) -> Path:
        return self.folder / WEIGHTS_FILE

    @property
    def groups_path(self) -> Path:
        return self.folder / GROUPS_FILE

    def packed_path(self, weight_format: WeightFormat) -> Path:
        return self.folder / f"packed-{weight_format}.safetensors"

    @property
    def config(self) -> dict[str, Any]:
        """The Hugging Face config, read anew."""
        return _read_json(self.folder / "config.json")

    @staticmethod
    def load(folder: Path) -> "PreparedModel":
        """Read the folder's facts; PreparationError when it is not a folder that preparation made."""
        facts = _read_json(folder / FACTS_FILE)
        if facts.get("prepare_version") != PREPARE_VERSION:
            raise PreparationError(f"{folder} was prepared by another version of firsttoken; prepare the model again")
        try:
            return PreparedModel(
                folder=folder,
                name=str(facts["name"]),
                window=int(facts["window"]),
                eos_ids=frozenset(TokenId(int(each)) for each in facts["eos_ids"]),
                source_hash=str(facts["source_hash"]),
                default_mode=NumericMode(facts["default_mode"]),
            )
        except (KeyError, TypeError, ValueError):
            raise PreparationError(f"{folder / FACTS_FILE} is damaged; delete the folder and prepare again") from None

    def write_facts(self) -> None:
        """Write the facts into the folder; the last step of preparation but the renaming."""
        facts = {
            "prepare_version": PREPARE_VERSION,
            "name": self.name,
            "window": self.window,
            "eos_ids": sorted(self.eos_ids),
            "source_hash": self.source_hash,
            "default_mode": self.default_mode,
        }
        (self.folder / FACTS_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise PreparationError(f"{path.parent} is not a prepared model folder: {path.name} cannot be read") from None
    except ValueError:
        raise PreparationError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(value, dict):
        raise PreparationError(f"{path} is damaged: it is not a JSON object")
    return cast("dict[str, Any]", value)
