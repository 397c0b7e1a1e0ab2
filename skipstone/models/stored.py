"""What lies in a folder of weights, by its index and headers alone, and whether a model can be filled from it.

The loader and `inspect` both ask here. The index is the authority: every entry must lie in the file that it names, and
every tensor of such a file must be an entry. Further files are not read. Without an index all *.safetensors are, and no
name may occur twice.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from skipstone.errors import CheckpointError, SkipstoneError, UnsupportedError
from skipstone.models.base import WeightedModel

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
LISTED = 8  # names of one kind that an error lists
PLAIN = ("BF16", "F16", "F32")
INTEGERS = {torch.int64: ("I64", "I32"), torch.bool: ("BOOL",)}  # slots that are no weights
# What can be read: the quant_method of config.json (None: weights are not quantised), and its weights' stored dtypes.
FORMATS: dict[str | None, tuple[str, ...]] = {None: PLAIN}
# Formats that show in the endings of names alone.
SIGNS = {"weight_scale_inv": "FP8 or MXFP8", "weight_scale": "FP8", "weight_scale_2": "NVFP4", "qweight": "GPTQ or AWQ"}
SIGNS |= {"weight_packed": "compressed-tensors", "SCB": "bitsandbytes", "absmax": "bitsandbytes"}
OTHER_FILES = {"*.gguf": "GGUF files", "*.bin": "pickled files", "*.pt": "pickled files", "*.pth": "pickled files"}
# Where a format is declared: in config.json or one of its sections, or in a file beside it.
SECTIONS = ("text_config", "transformer_layer_config")
KEYS = ("quantization_config", "compression_config")
FORMAT_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class StoredTensor(NamedTuple):
    """One tensor, as the header of its file describes it."""

    name: str
    dtype: str
    shape: list[int]
    file: str

    @property
    def numel(self) -> int:
        """Number of values."""
        return math.prod(self.shape)


class StoredWeights(NamedTuple):
    """The tensors of a folder. `refusal`: why their format cannot be read, naming it; None: it can."""

    folder: Path
    files: list[Path]
    tensors: dict[str, StoredTensor]
    unread: list[str]  # *.safetensors beside the index that it does not name
    refusal: str | None


def open_weights(folder: Path, raw: dict[str, Any]) -> StoredWeights:
    """Read index and headers; `raw` is config.json.

    Raises CheckpointError naming tensors and files: absent or damaged ones, an index that disagrees with the headers,
    a name that occurs twice.
    """
    index, present = folder / INDEX, sorted(folder.glob("*.safetensors"))
    weight_map = _read_index(index) if os.path.lexists(index) else None
    files = present if weight_map is None else [folder / name for name in sorted(set(weight_map.values()))]
    if not files:
        others = {kind: path.name for ending, kind in OTHER_FILES.items() for path in folder.glob(ending)}
        held = "".join(f", but {kind} ({name}), which cannot be read" for kind, name in others.items())
        raise CheckpointError(f"{folder} has no *.safetensors file{held}; download the weights of the model into it")
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing{f': {INDEX} names it' if weight_map else ''}; download it again")
    unread = [path.name for path in present if path not in files]
    if WHOLE in unread:
        raise CheckpointError(
            f"{folder} holds {WHOLE} and {INDEX}, which does not name it, so it is open which weights are meant; "
            "delete one of the two"
        )
    found = [tensor for file in files for tensor in _read_header(file)]
    places: dict[str, list[str]] = {}
    for tensor in found:
        places.setdefault(tensor.name, []).append(tensor.file)
    faults = list(_disagreements(weight_map, places))
    if faults:
        where = f"{folder} has no {INDEX}" if weight_map is None else f"{index} and the files that it names disagree"
        raise CheckpointError(f"{where}: {_listing('tensors', faults)}; delete what is stale, or download it again")
    return StoredWeights(folder, files, {tensor.name: tensor for tensor in found}, unread, _declared(folder, raw))


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(
            f"{index} cannot be read ({error}); it must hold an object weight_map from tensor names to file names: "
            "download it again"
        ) from None
    for name, file in weight_map.items():
        if file != os.path.basename(file) or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {name} is in {file!r}, which is no *.safetensors file of the folder")
    return weight_map


@contextmanager
def open_shard(file: Path, framework: str) -> Iterator[Any]:
    """One *.safetensors file. Raises CheckpointError for one that cannot be opened, or read in the block."""
    try:
        with safe_open(file, framework=framework) as shard:
            yield shard
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}); it may be truncated: download it again") from None


def _read_header(file: Path) -> list[StoredTensor]:
    with open_shard(file, "numpy") as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118 (not a dict)
        return [StoredTensor(name, s.get_dtype(), s.get_shape(), file.name) for name, s in slices.items()]


def _disagreements(weight_map: dict[str, str] | None, places: dict[str, list[str]]) -> Iterator[str]:
    for name, file in (weight_map or {}).items():
        if file not in places.get(name, []):
            where = f"it lies in {' and '.join(places[name])}" if name in places else "no file has it"
            yield f"{name} is not in {file}: {where}"
    for name, files in places.items():
        if weight_map is not None and name not in weight_map:
            yield f"{name} in {files[0]} is not in the index"
        elif len(files) > 1:
            yield f"{name} is in {' and '.join(files)}"


def _declared(folder: Path, raw: dict[str, Any]) -> str | None:
    """Why the format that config.json or a file beside it declares cannot be read."""
    found: dict[str, object] = {}
    for where, section in (("", raw), *((f"{name}.", raw.get(name)) for name in SECTIONS)):
        found |= {f"config.json: {where}{key}": section.get(key) for key in KEYS if isinstance(section, dict)}
    for name in FORMAT_FILES:
        if (folder / name).is_file():
            found[name] = (folder / name).read_text(errors="replace")
    for where, declared in found.items():
        method = declared.get("quant_method") if isinstance(declared, dict) else None
        if declared and (method is None or method not in FORMATS):
            name = f"the format {method.upper()}" if isinstance(method, str) else "a format"
            return (
                f"{folder}: {where} declares weights in {name} that cannot be read ({declared!s:.250}); {_readable()}, "
                "or take that out if they are not quantised any more"
            )
    return None


def _readable() -> str:
    return f"use a release in {', '.join(dict.fromkeys(dtype for dtypes in FORMATS.values() for dtype in dtypes))}"


class Match(NamedTuple):
    """What becomes of stored tensors in a model, and what keeps it from being loaded."""

    folder: Path
    slots: dict[str, Tensor]  # by name of the release
    loaded: dict[str, StoredTensor]  # slot -> what fills it
    ignored: list[tuple[str, StoredTensor]]  # reason, tensor
    faults: dict[str, list[str]]  # missing, unexpected, with another shape, for a slot that has one already
    refusal: str | None  # as in StoredWeights, or told from dtypes and names where nothing is declared

    @property
    def error(self) -> SkipstoneError | None:
        """What loading raises: UnsupportedError for a format, CheckpointError with all names that do not match."""
        if self.refusal is not None:
            return UnsupportedError(self.refusal)
        found = "; ".join(_listing(f"tensors {kind}", names) for kind, names in self.faults.items() if names)
        return CheckpointError(f"{self.folder} does not match its architecture: {found}") if found else None


def match_weights(model: WeightedModel, stored: StoredWeights) -> Match:
    """Compare names, shapes and dtypes with a model's slots; the model may be without memory."""
    slots = model.weight_slots()
    aliases = {name.removeprefix("language_model."): name for name in slots}
    loaded: dict[str, StoredTensor] = {}
    ignored: list[tuple[str, StoredTensor]] = []
    unexpected, shapes, twins, dtypes = [], [], [], []
    for tensor in stored.tensors.values():
        name = tensor.name if tensor.name in slots else aliases.get(tensor.name, tensor.name)
        if name not in slots:
            reason = model.ignored_weight(tensor.name)
            if reason is None:
                unexpected.append(tensor.name)
            else:
                ignored.append((reason, tensor))
            continue
        slot, first = slots[name], loaded.setdefault(name, tensor)
        if first is not tensor:
            twins.append(f"{first.name} in {first.file} and {tensor.name} in {tensor.file}")
        if tensor.shape != list(slot.shape):
            shapes.append(f"{name} {tensor.shape}, expected {list(slot.shape)}")
        if tensor.dtype not in (PLAIN if slot.is_floating_point() else INTEGERS[slot.dtype]):
            dtypes.append(f"{tensor.name} {tensor.dtype}")
    faults = {"unexpected": unexpected, "with another shape": shapes, "for a slot that has one already": twins}
    faults["missing"] = sorted(slots.keys() - loaded.keys())
    refusal = stored.refusal or _told(stored.folder, dtypes, unexpected)
    return Match(stored.folder, slots, loaded, ignored, faults, refusal)


def _told(folder: Path, dtypes: list[str], unexpected: list[str]) -> str | None:
    """The refusal of a format that shows in dtypes or names alone."""
    signs = {SIGNS[end]: name for name in unexpected if (end := name.rpartition(".")[2]) in SIGNS}
    seen = [f"names like {name} belong to {format_}" for format_, name in signs.items()]
    if dtypes:
        seen.insert(0, _listing("tensors are stored in a dtype that their slots do not take", dtypes))
    return f"{folder}: {'; '.join(seen)}; config.json declares no format; {_readable()}" if seen else None


def _listing(kind: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)} {kind}: {', '.join(names[:LISTED])}{more}"
