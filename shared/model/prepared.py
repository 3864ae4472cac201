"""A prepared model folder, as the services see it. Loads no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from shared.domain.ids import TokenId

PREPARE_VERSION = 1
"""Grows when preparation writes something else from the same source; older folders are then made anew."""
FACTS_FILE = "firsttoken.json"
WEIGHTS_FILE = "model.safetensors"


class PreparationError(Exception):
    """A model cannot be prepared or used; the message is one sentence for the person who asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedModel:
    """What preparation found out. `source_hash` is the SHA-256 of the source's content, in hexadecimal digits."""

    folder: Path
    name: str
    window: int
    eos_ids: frozenset[TokenId]
    source_hash: str

    @property
    def weights_path(self) -> Path:
        return self.folder / WEIGHTS_FILE

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
