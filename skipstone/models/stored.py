"""What lies in a folder of weights, by its index and headers alone, and whether a model can be filled from it.

The loader and `inspect` both ask here. The index is the authority: every entry must lie in the file that it names, and
every tensor of such a file must be an entry. Further files are not read. Without an index all *.safetensors are, and no
name may occur twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from skipstone.errors import CheckpointError, SkipstoneError, UnsupportedError
from skipstone.models.base import WeightedModel
from skipstone.models.headers import StoredTensor, read_header

INDEX = "model.safetensors.index.json"
WHOLE = "model.safetensors"
LISTED = 8  # names of one kind that an error lists
PLAIN = ("BF16", "F16", "F32")
# What can be read: the quant_method of config.json (None: weights are not quantised), and its weights' stored dtypes.
FORMATS: dict[str | None, tuple[str, ...]] = {None: PLAIN}
INTEGERS = {torch.int64: ("I64", "I32"), torch.bool: ("BOOL",)}  # slots that are no weights
# Names of formats: by quant_method, and by the endings of names that only such a checkpoint has.
NAMES = {"fp8": "FP8", "fbgemm_fp8": "FP8", "mxfp8": "MXFP8", "mxfp4": "MXFP4", "gptq": "GPTQ", "awq": "AWQ"}
SIGNS = {
    "weight_scale_inv": "FP8 or MXFP8 with block scales",
    "weight_scale_2": "ModelOpt NVFP4",
    "weight_packed": "compressed-tensors",
    "weight_scale": "FP8 or compressed-tensors",
    "qweight": "GPTQ or AWQ",
    "qzeros": "GPTQ or AWQ",
    "g_idx": "GPTQ",
    "SCB": "bitsandbytes int8",
    "absmax": "bitsandbytes",
    "quant_map": "bitsandbytes",
}
SECTIONS = ("text_config", "transformer_layer_config")  # of config.json, where a model's own keys may stand
KEYS = ("quantization_config", "compression_config")
FORMAT_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
SHOWN = ("fmt", "format", "bits", "w_bit", "quant_algo", "weight_block_size", "scale_fmt", "load_in_4bit")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


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
        raise CheckpointError(f"{folder} has no *.safetensors file; download the weights of the model into it")
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file} is missing{f': {INDEX} names it' if weight_map else ''}; download it again")
    unread = [file.name for file in present if file not in files]
    if WHOLE in unread:
        raise CheckpointError(
            f"{folder} holds {WHOLE} and {INDEX}, which does not name it, so it is open which weights are meant; "
            "delete one of the two"
        )
    found = [tensor for file in files for tensor in read_header(file)]
    places: dict[str, list[str]] = {}
    for tensor in found:
        places.setdefault(tensor.name, []).append(tensor.file)
    if weight_map is None:
        twice = [f"{name} in {' and '.join(where)}" for name, where in places.items() if len(where) > 1]
        if twice:
            raise CheckpointError(
                f"{folder} has no {INDEX}, and {_listing('tensors in several files', twice)}; delete the files that do "
                "not belong to the model"
            )
    elif disagreements := list(_disagreements(weight_map, places)):
        raise CheckpointError(
            f"{index} and the files that it names disagree: {_listing('tensors', disagreements)}; download the index "
            "and the files of one release again"
        )
    tensors = {tensor.name: tensor for tensor in found}
    return StoredWeights(folder, files, tensors, unread, _format_refusal(folder, raw))


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except OSError as error:
        raise CheckpointError(f"{index} cannot be read: {error.strerror}; download it again") from None
    except msgspec.DecodeError as error:
        raise CheckpointError(
            f"{index} must hold an object weight_map from tensor names to file names ({error}); download it again"
        ) from None
    for name, file in weight_map.items():
        if file != os.path.basename(file) or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: {name} is in {file!r}, which is no *.safetensors file of the folder")
    return weight_map


def _disagreements(weight_map: dict[str, str], places: dict[str, list[str]]) -> Iterator[str]:
    for name, file in weight_map.items():
        if file not in places.get(name, []):
            where = f"it lies in {' and '.join(places[name])}" if name in places else "no file has it"
            yield f"{name} is not in {file}, as the index says: {where}"
    for name, files in places.items():
        named = weight_map.get(name)
        for file in files:
            if named is None:
                yield f"{name} in {file} is not in the index"
            elif file != named and named in files:
                yield f"{name} in {named} has a copy in {file}"


def _format_refusal(folder: Path, raw: dict[str, Any]) -> str | None:
    """Why the format that config.json or a file beside it declares cannot be read."""
    sections = {"config.json": raw} | {f"config.json.{name}": raw.get(name) for name in SECTIONS}
    for where, section in sections.items():
        for key in KEYS:
            declared = section.get(key) if isinstance(section, dict) else None
            if declared:
                keys = declared if isinstance(declared, dict) else {}
                if (method := keys.get("quant_method")) not in FORMATS or method is None:
                    return _refusal(folder, f"{where}: {key}", method, keys)
    for name in FORMAT_FILES:
        if (folder / name).is_file():
            try:
                keys = msgspec.json.decode((folder / name).read_bytes(), type=dict[str, Any])
            except (OSError, msgspec.DecodeError):
                keys = {}
            nested = keys.get("quantization")
            keys = nested if isinstance(nested, dict) else keys
            return _refusal(folder, name, keys.get("quant_algo", keys.get("quant_method")), keys)
    return None


def _refusal(folder: Path, where: str, method: object, keys: dict[str, Any]) -> str:
    details = "".join(f", {key}={keys[key]!r}" for key in SHOWN if keys.get(key) is not None)
    return (
        f"{folder}: the weights are stored in the format {NAMES.get(str(method), method) or 'of an unnamed method'} "
        f"({where} says quant_method={method!r}{details}), which cannot be read; {_readable()}. If they are not "
        f"quantised any more, take that entry out"
    )


def _readable() -> str:
    more = "".join(f" or {NAMES.get(name, name)}" for name in FORMATS if name is not None)
    return f"use a release in {', '.join(PLAIN[:-1])} or {PLAIN[-1]}{more}"


class Match(NamedTuple):
    """What becomes of stored tensors in a model, and what keeps it from being loaded."""

    folder: Path
    slots: dict[str, Tensor]  # by name of the release
    loaded: dict[str, StoredTensor]  # slot -> what fills it
    ignored: list[tuple[str, StoredTensor]]  # reason, tensor
    missing: list[str]
    unexpected: list[str]
    other_shape: list[str]
    other_dtype: list[str]
    twins: list[str]
    refusal: str | None  # as in StoredWeights, or told from dtypes and names where nothing is declared

    @property
    def error(self) -> SkipstoneError | None:
        """What loading raises: UnsupportedError for a format, CheckpointError with all names that do not match."""
        if self.refusal is not None:
            return UnsupportedError(self.refusal)
        kinds = {
            "for a slot that has one already": self.twins,
            "unexpected": self.unexpected,
            "with another shape": self.other_shape,
            "missing": self.missing,
        }
        found = "; ".join(_listing(f"tensors {kind}", names) for kind, names in kinds.items() if names)
        return CheckpointError(f"{self.folder} does not match its architecture: {found}") if found else None


def match_weights(model: WeightedModel, stored: StoredWeights) -> Match:
    """Compare names, shapes and dtypes with a model's slots; the model may be without memory."""
    slots = model.weight_slots()
    aliases = {name.removeprefix("language_model."): name for name in slots}
    match = Match(stored.folder, slots, {}, [], [], [], [], [], [], stored.refusal)
    for tensor in stored.tensors.values():
        name = tensor.name if tensor.name in slots else aliases.get(tensor.name, tensor.name)
        if name not in slots:
            reason = model.ignored_weight(tensor.name)
            if reason is None:
                match.unexpected.append(tensor.name)
            else:
                match.ignored.append((reason, tensor))
            continue
        first = match.loaded.setdefault(name, tensor)
        if first is not tensor:
            match.twins.append(f"{first.name} in {first.file} and {tensor.name} in {tensor.file}")
        slot = slots[name]
        if tensor.shape != list(slot.shape):
            match.other_shape.append(f"{name} {tensor.shape}, expected {list(slot.shape)}")
        if tensor.dtype not in (PLAIN if slot.is_floating_point() else INTEGERS[slot.dtype]):
            match.other_dtype.append(f"{tensor.name} {tensor.dtype}")
    match.missing.extend(sorted(slots.keys() - match.loaded.keys()))
    return match._replace(refusal=stored.refusal or _undeclared(match))


def _undeclared(match: Match) -> str | None:
    """The refusal of a format that shows in dtypes or names alone."""
    signs = {name: SIGNS[end] for name in match.unexpected if (end := name.rpartition(".")[2]) in SIGNS}
    if not match.other_dtype and not signs:
        return None
    seen = [_listing("tensors are stored in a dtype that their slots do not take", match.other_dtype)]
    if signs:
        names = f"{len(signs)} names like {next(iter(signs))} belong to {', '.join(dict.fromkeys(signs.values()))}"
        seen = [*(seen if match.other_dtype else []), names]
    return f"{match.folder}: {'; '.join(seen)}; config.json declares no format; {_readable()}"


def _listing(kind: str, names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)} {kind}: {', '.join(names[:LISTED])}{more}"
