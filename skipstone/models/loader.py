"""From a checkpoint folder to a model: config, architecture, weights streamed shard by shard.

Each tensor is read once, straight into the view it fills. Every name that is missing, unexpected or of another shape is
reported in one error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from skipstone.errors import CheckpointError, ConfigError, UnsupportedError
from skipstone.kernels.ops import Ops, use_ops
from skipstone.models.base import CausalLM, WeightedModel
from skipstone.registry import MODELS

LISTED = 8  # names of one kind that an error lists


class ModelInfo(NamedTuple):
    """What config.json says the folder holds."""

    folder: Path
    architecture: str
    raw: dict[str, Any]
    model_class: type[CausalLM]
    config: Any
    random_weights: bool = False  # for benchmarks: nothing is read, the text means nothing


def read_model_info(folder: Path) -> ModelInfo:
    """Read config.json and pick the architecture.

    Raises CheckpointError without a readable config.json, UnsupportedError for an unknown architecture and ConfigError
    for a bad key.
    """
    raw = read_json(folder / "config.json", "a model folder needs the config.json of its release")
    names = raw.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError(f"config.json: architectures={names!r} must list the model class; take it from the release")
    model_class = MODELS.load(str(names[0]))
    return ModelInfo(folder, str(names[0]), raw, model_class, model_class.read_config(raw))


def with_index_keys(info: ModelInfo, index_keys: str) -> ModelInfo:
    """The model with its index keys cached as the option says.

    Raises UnsupportedError for fp8 and an architecture whose index keys are not those of single tokens.
    """
    if index_keys != "fp8":
        return info
    config = info.model_class.with_fp8_index_keys(info.config)
    if config is None:
        raise UnsupportedError(
            f"index_keys=fp8 and {info.architecture} cannot be combined: FP8 index keys are for token-sparse attention "
            "(DeepSeek-V3.2), which this architecture does not have; leave --index-keys out"
        )
    return info._replace(config=config)


def read_json(path: Path, purpose: str) -> dict[str, Any]:
    """A JSON object. Raises CheckpointError with the purpose of the file."""
    try:
        value = msgspec.json.decode(path.read_bytes())
    except OSError:
        raise CheckpointError(f"{path} cannot be read; {purpose}") from None
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON ({error}); {purpose}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object; {purpose}")
    return value


def shard_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, by its index when it has one. Raises CheckpointError for a missing shard."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index, "it lists the weights").get("weight_map", {})
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} has no *.safetensors file; download the weights of the model into it")
    for file in files:
        if not file.exists():
            raise CheckpointError(f"{file} is listed in {index.name} but missing; download it again")
    return files


def tensor_names(folder: Path) -> list[str]:
    """Names of all tensors in a folder's shards. Raises CheckpointError."""
    names: list[str] = []
    for file in shard_files(folder):
        try:
            with safe_open(file, framework="pt") as shard:
                names += shard.keys()
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); it may be truncated: download it again") from None
    return names


def load_weights(model: WeightedModel, folder: Path) -> None:
    """Fill every parameter of the model from the folder's shards, then derive what depends on them.

    Raises CheckpointError with all missing, unexpected and mis-shaped names, or naming a shard that cannot be read.
    """
    slots = model.weight_slots()
    aliases = {name.removeprefix("language_model."): name for name in slots}
    filled: set[str] = set()
    problems: dict[str, list[str]] = {"unexpected": [], "with another shape": []}
    for file in shard_files(folder):
        try:
            with safe_open(file, framework="pt") as shard:
                for stored in shard.keys():  # noqa: SIM118 (not a dict)
                    name = stored if stored in slots else aliases.get(stored, stored)
                    if name in slots:
                        _fill(slots[name], shard.get_tensor(stored), name, problems)
                        filled.add(name)
                    elif model.ignored_weight(stored) is None:
                        problems["unexpected"].append(stored)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read ({error}); it may be truncated: download it again") from None
    problems["missing"] = sorted(slots.keys() - filled)
    if any(problems.values()):
        raise CheckpointError(f"{folder} does not match its architecture: " + _listing(problems))
    model.after_load()


def fill_weights(model: WeightedModel, info: ModelInfo) -> None:
    """Weights from the model's folder, or random ones: gains of 1, and matrices that keep sizes as they are."""
    if not info.random_weights:
        load_weights(model, info.folder)
        return
    for view in model.weight_slots().values():
        if view.dim() < 2:
            view.fill_(1.0)
        else:
            view.normal_(std=view.shape[-1] ** -0.5)
    model.after_load()


def _fill(view: Tensor, tensor: Tensor, name: str, problems: dict[str, list[str]]) -> None:
    if view.shape == tensor.shape:
        view.copy_(tensor)
    else:
        problems["with another shape"].append(f"{name} {list(tensor.shape)}, expected {list(view.shape)}")


def _listing(problems: dict[str, list[str]]) -> str:
    parts = []
    for kind, names in problems.items():
        if names:
            more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
            parts.append(f"{len(names)} tensors {kind}: {', '.join(names[:LISTED])}{more}")
    return "; ".join(parts)


class Build(NamedTuple):
    """How a model is built, and what it computes with."""

    dtype: torch.dtype
    exact: bool
    max_position: int
    device: torch.device
    ops: Ops


def build_model(info: ModelInfo, build: Build) -> CausalLM:
    """An initialised model with the folder's weights. Errors as in `load_weights`."""
    model = empty_model(info, build)
    fill_weights(model, info)
    return model


def empty_model(info: ModelInfo, build: Build) -> CausalLM:
    """A model whose weights are not set."""
    with torch.device(build.device):
        model = info.model_class(info.config, build.dtype, build.exact, build.max_position)
    use_ops(model, build.ops)
    return model
