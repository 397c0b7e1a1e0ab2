"""Checkpoint folders with one thing wrong, and the words that the error must contain."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any


def change(model: Path, target: Path, edit: Callable[[Path], object]) -> Path:
    """A copy of a checkpoint with one thing wrong."""
    shutil.copytree(model, target)
    edit(target)
    return target


def edit_config(**keys: Any) -> Callable[[Path], object]:
    """Change keys of text_config, or remove those that are None."""

    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for key, value in keys.items():
            place = config if key == "architectures" else config["text_config"]
            place[key] = value
            if value is None:
                del place[key]
        (folder / "config.json").write_text(json.dumps(config))

    return edit


def truncate(folder: Path) -> None:
    shard = sorted(folder.glob("*.safetensors"))[0]
    os.truncate(shard, shard.stat().st_size - 100)


def remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def remove_shard(folder: Path) -> None:
    sorted(folder.glob("*.safetensors"))[1].unlink()


BAD_CHECKPOINTS = {
    "no config": (remove_config, ["has no config.json"]),
    "unknown architecture": (edit_config(architectures=["QwenFoo"]), ["QwenFoo", "is not supported", "Known: "]),
    "missing key": (edit_config(head_dim=None), ["head_dim", "is missing"]),
    "absurd value": (edit_config(head_dim=-3), ["head_dim=-3", "must be a whole number of at least 1"]),
    "missing shard": (remove_shard, [".safetensors", "missing"]),
    "truncated shard": (truncate, [".safetensors", "truncated", "download it again"]),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), ["config.json", "not valid JSON"]),
}
