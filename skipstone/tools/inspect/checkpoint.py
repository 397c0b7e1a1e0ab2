"""What a checkpoint holds, compared with what its architecture needs: from headers and a model without memory.

The model is built on torch's meta device, so that a checkpoint of any size is looked into in seconds.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

import msgspec
import torch

from skipstone.cli.options import Settings
from skipstone.errors import CheckpointError, SkipstoneError
from skipstone.kernels.dispatch import choose_device, choose_dtype, free_memory_bytes
from skipstone.llm import GenerationConfig
from skipstone.models.base import CausalLM, DraftHead
from skipstone.models.loader import ModelInfo, memory_refusal, mtp_bytes, read_model_info, weight_bytes, with_index_keys
from skipstone.models.mtp import MtpHead
from skipstone.models.stored import Match, StoredTensor, StoredWeights, match_weights, open_weights
from skipstone.runtime.proposers import Candidate, candidates, count_mtp_modules
from skipstone.text.tokenizer import Tokenizer, find_template
from skipstone.tools.inspect.headers import read_header
from skipstone.tools.inspect.heads import check_candidate

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
FAULTS = {
    "missing": "missing",
    "unexpected": "unexpected",
    "other_shape": "with another shape",
    "twins": "for a slot that has one already",
}  # fields of the report, and what `Match.faults` calls them
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
    sparse_budget: str | None
    parts: list[PartReport]
    run_dtype: str
    index_keys: str
    loaded_bytes: int
    cache_groups: list[CacheGroupReport]
    cache_bytes_per_token: int
    free_bytes: int
    tokens_that_fit: int
    mtp_loaded_bytes: int
    does_not_fit: str | None
    format_refused: str | None
    missing: list[str]
    unexpected: list[str]
    other_shape: list[str]
    twins: list[str]
    unread: list[str]
    unusable: list[str]
    declared_but_absent: list[str]
    mtp_modules_declared: int
    mtp_modules_present: int
    mtp_cache_bytes_per_token: int
    proposers: list[Candidate]
    tokenizer: bool
    chat_template: str | None
    licences: list[str]

    @property
    def complete(self) -> bool:
        """Whether every weight is there, in its shape, and nothing else, and the files beside them can be used."""
        return not (self.format_refused or self.unusable or any(getattr(self, field) for field in FAULTS))

    @property
    def loads(self) -> bool:
        """Whether it is complete and fits into the memory that is free here, as with no options but these."""
        return self.complete and self.does_not_fit is None


def examine(folder: Path, dtype: str, index_keys: str = "model", device: str = "auto") -> CheckpointReport:
    """Look into a checkpoint folder. `dtype`, `index_keys` and `device` as in EngineConfig.

    Raises CheckpointError for absent, truncated or damaged files; ConfigError and UnsupportedError for config.json.
    """
    info = with_index_keys(read_model_info(folder), index_keys)
    stored = _open(info)
    tensors = stored.tensors.values()
    place = choose_device(device)
    run_dtype = choose_dtype(dtype, place)
    present, declared = count_mtp_modules(info, stored), info.config.declared_mtp_modules
    mtp: DraftHead | None = None
    with torch.device("meta"):
        model: CausalLM = info.model_class(info.config, run_dtype, True, 1)
        if present:
            mtp = MtpHead(model, present, run_dtype, False, stored.tensors)
    absent = f"config.json declares {declared} MTP modules, the files hold {present}"
    match = match_weights(model, stored)
    matches = [match] if mtp is None else [match, match_weights(mtp, stored)]
    groups = _cache_groups(model, run_dtype)
    loaded, more = weight_bytes(model), mtp_bytes(match, run_dtype)
    per_token, free = sum(group.bytes_per_token for group in groups), free_memory_bytes(place)
    return CheckpointReport(
        folder=str(folder),
        architecture=info.architecture,
        files=len(stored.files),
        bytes_on_disk=sum(file.stat().st_size for file in stored.files),
        stored_dtypes=dict(Counter(tensor.dtype for tensor in tensors).most_common()),
        layers=_layers(model),
        max_position_embeddings=info.config.max_position_embeddings,
        vocab_size=info.config.vocab_size,
        sparse_budget=info.config.sparse.text if any(group.backend != "dense" for group in groups) else None,
        parts=_parts(match, stored.files),
        run_dtype=str(run_dtype).removeprefix("torch."),
        index_keys=index_keys,
        loaded_bytes=loaded,
        cache_groups=groups,
        cache_bytes_per_token=per_token,
        free_bytes=free,
        tokens_that_fit=max(0, free - loaded) // per_token,
        mtp_loaded_bytes=more,
        does_not_fit=memory_refusal(loaded, more, run_dtype, free),
        format_refused=next((one.refusal for one in matches if one.refusal), None),
        **{field: [text for one in matches for text in one.faults[kind]] for field, kind in FAULTS.items()},
        unread=stored.unread,
        unusable=_unusable(info),
        declared_but_absent=[] if present == declared else [absent],
        mtp_modules_declared=declared,
        mtp_modules_present=present,
        mtp_cache_bytes_per_token=sum(spec.bytes_per_token(run_dtype) for spec in mtp.cache_specs()) if mtp else 0,
        proposers=[check_candidate(candidate, info, model, matches[-1]) for candidate in candidates(info)],
        tokenizer=(folder / "tokenizer.json").is_file(),
        chat_template=_chat_template(info),
        licences=sorted({path.name for pattern in LICENCES for path in folder.glob(pattern)}),
    )


def _open(info: ModelInfo) -> StoredWeights:
    """Index and headers; what is wrong with one is said more closely."""
    try:
        return open_weights(info.folder, info.raw)
    except CheckpointError:
        for file in sorted(info.folder.glob("*.safetensors")):
            read_header(file)
        raise


def _parts(match: Match, files: list[Path]) -> list[PartReport]:
    sizes = {name: entry.num_bytes for file in files for name, entry in read_header(file).items()}
    members: dict[tuple[str, bool], list[StoredTensor]] = defaultdict(list)
    for name, tensor in match.loaded.items():
        part = next((part for part, pattern in PARTS if re.search(pattern, name)), "other")
        members[part, True].append(tensor)
    for reason, tensor in match.ignored:
        members[reason, False].append(tensor)
    places = {part: place for place, (part, _) in enumerate(PARTS)}
    ordered = sorted(members.items(), key=lambda item: (places.get(item[0][0], len(PARTS)), item[0][0], not item[0][1]))
    return [
        PartReport(part, len(own), sum(each.numel for each in own), sum(sizes[each.name] for each in own), loaded)
        for (part, loaded), own in ordered
    ]


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
    sizes: dict[tuple[str, str], list[int]] = defaultdict(list)
    for spec in model.cache_specs():
        sizes[spec.group, spec.backend].append(spec.bytes_per_token(dtype))
    return [CacheGroupReport(*group, len(members), sum(members)) for group, members in sizes.items()]


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
        Settings({}, {}).with_checkpoint(generation.sampling)
    except SkipstoneError as error:
        found.append(str(error))
    return found


def _chat_template(info: ModelInfo) -> str | None:
    """Where the chat template comes from; None without one, and for files that `_unusable` complains of."""
    try:
        found = find_template(info.folder)
    except SkipstoneError:
        return None
    return found[0] if found else None
