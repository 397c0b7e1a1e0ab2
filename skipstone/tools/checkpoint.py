"""What a checkpoint holds, compared with what its architecture needs: from headers and a model without memory.

The model is built on torch's meta device, so that a checkpoint of any size is looked into in seconds.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import torch

from skipstone.core.kv_cache import CacheSpec
from skipstone.errors import RequestError, SkipstoneError
from skipstone.kernels.dispatch import choose_device, choose_dtype
from skipstone.llm import GenerationConfig
from skipstone.models.base import CausalLM, DraftHead
from skipstone.models.loader import ModelInfo, read_model_info, shard_files, with_index_keys
from skipstone.registry import DRAFT_HEADS
from skipstone.runtime.available import candidates, count_mtp_modules
from skipstone.runtime.memory import free_memory_bytes
from skipstone.serve.cli_options import Settings
from skipstone.serve.text import Tokenizer
from skipstone.tools.headers import StoredTensor, read_header

# The first pattern that a name contains decides its part.
PARTS = (
    ("embedding", r"embed_tokens"),
    ("head", r"lm_head"),
    ("indexer", r"\.indexer\.|\.index_[qk]_"),
    ("shared experts", r"shared_experts"),
    ("experts", r"\.experts\.\d"),
    ("router", r"\.gate\.|e_score_correction_bias"),
    ("norms", r"norm\."),
    ("attention", r"\.self_attn\."),
    ("dense feed-forward", r"\.mlp\."),
)
LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*", "COPYING*")


class PartReport(msgspec.Struct, frozen=True):
    """One part of the network: values and bytes on disk."""

    part: str
    tensors: int
    parameters: int
    num_bytes: int
    loaded: bool


class CacheGroupReport(msgspec.Struct, frozen=True):
    """One cache group: its layers and what a token takes in all of them."""

    group: str
    backend: str
    layers: int
    bytes_per_token: int


class ProposerReport(msgspec.Struct, frozen=True):
    """One proposer: the value of --spec that names it, and whether this model has what it needs."""

    method: str
    spec: str
    works: bool
    reason: str


class CheckpointReport(msgspec.Struct, frozen=True):
    """Everything `skipstone inspect` shows."""

    folder: str
    architecture: str
    files: int
    bytes_on_disk: int
    stored_dtypes: dict[str, int]
    layers: dict[str, int]
    max_position_embeddings: int
    vocab_size: int
    parts: list[PartReport]
    run_dtype: str
    index_keys: str
    loaded_bytes: int
    cache_groups: list[CacheGroupReport]
    cache_bytes_per_token: int
    free_bytes: int
    tokens_that_fit: int
    missing: list[str]
    unexpected: list[str]
    other_shape: list[str]
    unusable: list[str]
    declared_but_absent: list[str]
    mtp_modules_declared: int
    mtp_modules_present: int
    mtp_cache_bytes_per_token: int
    proposers: list[ProposerReport]
    tokenizer: bool
    chat_template: str | None
    licences: list[str]

    @property
    def loads(self) -> bool:
        """Whether every weight is there, in its shape, and nothing else, and the files beside them can be used."""
        return not (self.missing or self.unexpected or self.other_shape or self.unusable)


def examine(folder: Path, dtype: str, index_keys: str = "model", device: str = "auto") -> CheckpointReport:
    """Look into a checkpoint folder. `dtype`, `index_keys` and `device` as in EngineConfig.

    Raises CheckpointError for absent, truncated or damaged files; ConfigError and UnsupportedError for config.json.
    """
    info = with_index_keys(read_model_info(folder), index_keys)
    files = shard_files(folder)
    tensors = [tensor for file in files for tensor in read_header(file)]
    place = choose_device(device)
    run_dtype = choose_dtype(dtype, place)
    present = count_mtp_modules(info)
    with torch.device("meta"):
        model: CausalLM = info.model_class(info.config, run_dtype, True, 1)
        draft_specs = _mtp_caches(info, model, present, run_dtype)
    matched = _match(model, tensors)
    loaded = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    groups = _cache_groups(model, run_dtype)
    per_token, free = sum(group.bytes_per_token for group in groups), free_memory_bytes(place)
    return CheckpointReport(
        folder=str(folder),
        architecture=info.architecture,
        files=len(files),
        bytes_on_disk=sum(file.stat().st_size for file in files),
        stored_dtypes=dict(Counter(tensor.dtype for tensor in tensors).most_common()),
        layers=_layers(model),
        max_position_embeddings=info.config.max_position_embeddings,
        vocab_size=info.config.vocab_size,
        parts=_parts(matched),
        run_dtype=str(run_dtype).removeprefix("torch."),
        index_keys=index_keys,
        loaded_bytes=loaded,
        cache_groups=groups,
        cache_bytes_per_token=per_token,
        free_bytes=free,
        tokens_that_fit=max(0, free - loaded) // per_token,
        missing=sorted(set(matched.slots) - matched.slots_filled()),
        unexpected=matched.unexpected,
        other_shape=matched.other_shape(),
        unusable=_unusable(info),
        declared_but_absent=_absent(info, present),
        mtp_modules_declared=info.config.declared_mtp_modules,
        mtp_modules_present=present,
        mtp_cache_bytes_per_token=sum(spec.bytes_per_token(run_dtype) for spec in draft_specs),
        proposers=[ProposerReport(*candidate) for candidate in candidates(info)],
        tokenizer=(folder / "tokenizer.json").is_file(),
        chat_template=_chat_template(folder),
        licences=sorted({path.name for pattern in LICENCES for path in folder.glob(pattern)}),
    )


class _Match(msgspec.Struct):
    """Stored tensors by what becomes of them."""

    slots: dict[str, Any]  # hub name -> the meta tensor it fills
    loaded: list[tuple[str, StoredTensor]] = []  # slot name, tensor
    ignored: list[tuple[str, StoredTensor]] = []  # reason, tensor
    unexpected: list[str] = []

    def slots_filled(self) -> set[str]:
        return {name for name, _ in self.loaded}

    def other_shape(self) -> list[str]:
        pairs = [(name, tensor.shape, list(self.slots[name].shape)) for name, tensor in self.loaded]
        return [f"{name} {stored}, expected {needed}" for name, stored, needed in pairs if stored != needed]


def _match(model: CausalLM, tensors: list[StoredTensor]) -> _Match:
    match = _Match(model.weight_slots())
    aliases = {name.removeprefix("language_model."): name for name in match.slots}
    for tensor in tensors:
        name = tensor.name if tensor.name in match.slots else aliases.get(tensor.name, tensor.name)
        reason = model.ignored_weight(tensor.name)
        if name in match.slots:
            match.loaded.append((name, tensor))
        elif reason is not None:
            match.ignored.append((reason, tensor))
        else:
            match.unexpected.append(tensor.name)
    return match


def _parts(match: _Match) -> list[PartReport]:
    labelled = [(_part(name), tensor, True) for name, tensor in match.loaded]
    labelled += [(reason, tensor, False) for reason, tensor in match.ignored]
    known = [part for part, _ in PARTS]
    order = [*known, *sorted({part for part, _, _ in labelled} - set(known))]
    reports = []
    for part in order:
        for loaded in (True, False):
            chosen = [tensor for label, tensor, kept in labelled if (label, kept) == (part, loaded)]
            numel, size = sum(tensor.numel for tensor in chosen), sum(tensor.num_bytes for tensor in chosen)
            reports.append(PartReport(part, len(chosen), numel, size, loaded))
    return [report for report in reports if report.tensors]


def _part(name: str) -> str:
    return next((part for part, pattern in PARTS if re.search(pattern, name)), "other")


def _layers(model: CausalLM) -> dict[str, int]:
    """Layers by kind of attention and by kind of feed-forward."""
    attention = {spec.layer: spec.backend for spec in reversed(model.cache_specs())}  # a layer's first group attends
    names = model.weight_slots()
    experts = {found[1] for name in names if (found := re.search(r"layers\.(\d+)\..*experts\.", name))}
    layers, sparse = len(attention), sum(backend != "dense" for backend in attention.values())
    return {
        "layers": layers,
        "dense attention": layers - sparse,
        "sparse attention": sparse,
        "dense feed-forward": layers - len(experts),
        "MoE feed-forward": len(experts),
    }


def _cache_groups(model: CausalLM, dtype: torch.dtype) -> list[CacheGroupReport]:
    specs = model.cache_specs()
    reports = []
    for group, backend in dict.fromkeys((spec.group, spec.backend) for spec in specs):
        members = [spec for spec in specs if (spec.group, spec.backend) == (group, backend)]
        size = sum(spec.bytes_per_token(dtype) for spec in members)
        reports.append(CacheGroupReport(group, backend, len(members), size))
    return reports


def _mtp_caches(info: ModelInfo, model: CausalLM, present: int, dtype: torch.dtype) -> list[CacheSpec]:
    """Caches that MTP modules add when they draft."""
    if not present:
        return []
    head: DraftHead = DRAFT_HEADS.load(info.architecture)(model, present, dtype, False)
    return head.cache_specs()


def _absent(info: ModelInfo, present: int) -> list[str]:
    """What config.json announces and the files do not hold."""
    declared = info.config.declared_mtp_modules
    return [] if present == declared else [f"config.json declares {declared} MTP modules, the files hold {present}"]


def _unusable(info: ModelInfo) -> list[str]:
    """What is wrong with the tokenizer's files and with generation_config.json, in the words of the engine."""
    found = []
    try:
        if (info.folder / "tokenizer.json").exists():
            Tokenizer(info.folder)
    except SkipstoneError as error:
        found.append(str(error))
    try:
        generation = GenerationConfig(info.folder)
        generation.eos_token_ids(info)
        params = Settings({}, {}).with_checkpoint(generation.sampling).sampling_params()
        params.validate(info.config.vocab_size)
    except RequestError as error:
        found.append(f"generation_config.json: {error}")
    except SkipstoneError as error:
        found.append(str(error))
    return found


def _chat_template(folder: Path) -> str | None:
    """The file that holds the chat template."""
    if (folder / "chat_template.jinja").is_file():
        return "chat_template.jinja"
    try:
        config = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return None
    return "tokenizer_config.json" if config.get("chat_template") else None
