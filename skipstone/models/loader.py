"""From a checkpoint folder to a model: config, architecture, weights streamed shard by shard."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor

from skipstone.errors import CheckpointError, ConfigError, UnsupportedError
from skipstone.kernels.dispatch import free_memory_bytes
from skipstone.kernels.ops import Ops, settle, use_ops
from skipstone.models.base import MTP_MODULE, CausalLM, WeightedModel
from skipstone.models.stored import Match, StoredWeights, match_weights, open_shard, open_weights
from skipstone.registry import MODELS

Model = TypeVar("Model", bound=WeightedModel)


class ModelInfo(NamedTuple):
    """What config.json says the folder holds."""

    folder: Path
    architecture: str
    raw: dict[str, Any]
    model_class: type[CausalLM]
    config: Any
    random_weights: bool = False  # for benchmarks: nothing is read, the text means nothing

    @property
    def weights(self) -> StoredWeights | None:
        """Index and headers of its files, read anew; None for random weights. Errors as in `open_weights`."""
        return None if self.random_weights else open_weights(self.folder, self.raw)


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


class Place(NamedTuple):
    """Where a model runs, with what, and in which dtype."""

    device: torch.device
    ops: Ops
    dtype: torch.dtype


class Build(NamedTuple):
    """How a language model is built. `with_mtp`: the MTP modules in its files will be loaded behind it."""

    exact: bool
    max_position: int
    place: Place
    with_mtp: bool = False


def build_model(info: ModelInfo, build: Build) -> CausalLM:
    """An initialised model with the folder's weights. Errors as in `load`."""

    def make() -> CausalLM:
        return info.model_class(info.config, build.place.dtype, build.exact, build.max_position)

    return load(make, info.weights, build.place, build.with_mtp)


def load(make: Callable[[], Model], stored: StoredWeights | None, place: Place, with_mtp: bool = False) -> Model:
    """What `make` makes, with its weights: a model or a draft head. Random ones without `stored`.

    Names, shapes, dtypes and memory are checked before anything is allocated. Raises UnsupportedError for a format that
    cannot be read, CheckpointError with all names that do not match, ConfigError for too little memory.
    """
    with torch.device("meta"):
        blueprint = make()
    match = None if stored is None else match_weights(blueprint, stored)
    if match is not None and match.error is not None:
        raise match.error
    more = mtp_bytes(match, place.dtype) if match is not None and with_mtp else 0
    if refusal := memory_refusal(weight_bytes(blueprint), more, place.dtype, free_memory_bytes(place.device)):
        raise ConfigError(refusal)
    with torch.device(place.device):
        model = make()
    use_ops(model, place.ops)
    if match is None:
        _draw(model)
    else:
        _read(model.weight_slots(), match)
    model.after_load()
    settle(model)
    return model


def weight_bytes(model: WeightedModel) -> int:
    """What the weights of a model without memory would take, but for those that it shares with one that has some."""
    return sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight.is_meta)


def mtp_bytes(match: Match, dtype: torch.dtype) -> int:
    """What the MTP modules beside a matched model take in its dtype, by their headers."""
    return dtype.itemsize * sum(tensor.numel for reason, tensor in match.ignored if reason == MTP_MODULE)


def memory_refusal(needed: int, more: int, dtype: torch.dtype, free: int) -> str | None:
    """Why weights, and `more` bytes of MTP modules, cannot be loaded in so much free memory; None: they can."""
    if needed + more <= free:
        return None
    modules = f" and those of MTP modules {more:,}" if more else ""
    hints = ["--spec off leaves the modules out"] if more and needed <= free else []
    hints += ["--dtype bfloat16 halves them"] if dtype == torch.float32 and (needed + more) // 2 <= free else []
    name = str(dtype).removeprefix("torch.")
    way = ", or ".join([*hints, "use a machine with more memory"])
    return f"the weights take {needed:,} bytes as {name}{modules}, but {free:,} bytes are free here: {way}"


def _read(slots: dict[str, Tensor], match: Match) -> None:
    """Each tensor once, straight into the view that it fills, file by file."""
    for file, entries in groupby(match.loaded.items(), lambda entry: entry[1].file):
        with open_shard(match.folder / file, "pt") as shard:
            for name, tensor in entries:
                slots[name].copy_(shard.get_tensor(tensor.name))


def _draw(model: WeightedModel) -> None:
    """Random weights: gains of 1, and matrices that keep sizes as they are."""
    for view in model.weight_slots().values():
        if view.dim() < 2:
            view.fill_(1.0)
        else:
            view.normal_(std=view.shape[-1] ** -0.5)
