"""Proposers whose weights lie in a folder of their own: EAGLE-3 and DFlash heads, independent draft models."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from skipstone.errors import CheckpointError, ConfigError
from skipstone.models.base import WeightedModel
from skipstone.models.dflash import Dflash, read_dflash
from skipstone.models.eagle3 import Eagle3, read_eagle3
from skipstone.models.loader import (
    Build,
    ModelInfo,
    build_model,
    load_weights,
    read_json,
    read_model_info,
    tensor_names,
)
from skipstone.models.locate import head_folder
from skipstone.registry import MODELS
from skipstone.runtime.speculation import Surroundings
from skipstone.spec.dflash import DflashProposer
from skipstone.spec.draft_model import DraftModelProposer
from skipstone.spec.hidden_state import HiddenStateProposer
from skipstone.spec.proposer import Proposer
from skipstone.spec_config import SpecConfig


class HeadFolder(NamedTuple):
    """A folder and its config.json, `where` for messages."""

    folder: Path
    raw: dict[str, Any]
    where: str


def make_eagle3(spec: SpecConfig, around: Surroundings) -> Proposer:
    """An EAGLE-3 head, in the hub's layout or that of the speculators library."""
    head = _open(spec, around.info, "LlamaForCausalLMEagle3", "eagle3")
    config = read_eagle3(head.raw, around.info.config, head.where)
    names = tensor_names(head.folder)
    try:
        model = around.place(lambda: Eagle3(config, around.target, names, around.dtype, around.max_position))
    except CheckpointError as error:
        raise CheckpointError(f"{head.folder}: {error}") from None
    _fill(model, head.folder)
    proposer = HiddenStateProposer("eagle3", model)
    proposer.needs = proposer.needs._replace(default_k=_declared_k(head))
    return proposer


def make_dflash(spec: SpecConfig, around: Surroundings) -> Proposer:
    """A DFlash head."""
    head = _open(spec, around.info, "DFlashDraftModel", "dflash")
    config = read_dflash(head.raw, around.info.config, head.where)
    model = around.place(lambda: Dflash(config, around.target, around.dtype, around.max_position))
    _fill(model, head.folder)
    return DflashProposer(model)


def make_draft(spec: SpecConfig, around: Surroundings) -> Proposer:
    """Any language model of the registry that has the target's vocabulary."""
    folder = head_folder("draft", spec.folder, around.info.folder)
    try:
        info = read_model_info(folder)
    except CheckpointError as error:
        raise CheckpointError(f"spec=draft: {error}") from None
    _compare_vocabularies(info, around.info)
    longest = min(info.config.max_position_embeddings, around.max_position)
    build = Build(around.dtype, False, longest, around.device, around.ops)
    return DraftModelProposer(build_model(info, build), longest)


def _open(spec: SpecConfig, info: ModelInfo, architecture: str, method: str) -> HeadFolder:
    """The head's folder. Raises ConfigError when it is not named, does not exist or holds something else."""
    folder = head_folder(method, spec.folder, info.folder)
    raw = read_json(folder / "config.json", "a draft head's folder needs the config.json of its release")
    where = f"{folder.name}/config.json"
    kind = raw.get("speculators_model_type")
    if kind is not None and not (kind == method == "eagle3"):
        raise ConfigError(f"{where}: speculators_model_type={kind!r} does not fit spec={method}; " + _hint(kind))
    names = raw.get("architectures")
    if kind is None and names != [architecture]:
        found = names[0] if isinstance(names, list) and names else None
        raise ConfigError(f"{where}: architectures={names!r} does not fit spec={method}; " + _hint(found))
    return HeadFolder(folder, raw, where)


def _hint(found: object) -> str:
    """What the folder can be used for."""
    methods = {"LlamaForCausalLMEagle3": "eagle3", "eagle3": "eagle3", "DFlashDraftModel": "dflash"}
    methods |= dict.fromkeys(MODELS.entries, "draft")
    method = methods.get(str(found))
    if method:
        return f"use {method}:FOLDER:K for it"
    return "it must be ['LlamaForCausalLMEagle3'] or speculators' eagle3 for eagle3, ['DFlashDraftModel'] for dflash"


def _fill(model: WeightedModel, folder: Path) -> None:
    try:
        load_weights(model, folder)
    except CheckpointError as error:
        text = str(error)
        raise CheckpointError(
            f"{text if str(folder) in text else f'{folder}: {text}'}; is this a complete head for this model?"
        ) from None


def _declared_k(head: HeadFolder) -> int | None:
    """Drafts a step that the speculators config proposes."""
    declared = head.raw.get("speculators_config")
    methods = declared.get("proposal_methods") if isinstance(declared, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    k = first.get("speculative_tokens") if isinstance(first, dict) else None
    if k is None:
        return None
    if not isinstance(k, int) or k < 1:
        raise ConfigError(f"{head.where}: speculative_tokens={k!r} must be a whole number of at least 1; fix it")
    return k


def _compare_vocabularies(draft: ModelInfo, target: ModelInfo) -> None:
    """Raise ConfigError unless both models give the same tokens the same ids."""
    names = f"draft model {draft.folder.name} and target {target.folder.name}"
    if draft.config.vocab_size != target.config.vocab_size:
        raise ConfigError(
            f"{names} have different vocabularies: vocab_size={draft.config.vocab_size} and "
            f"{target.config.vocab_size}; use a draft model of the target's family"
        )
    files = [info.folder / "tokenizer.json" for info in (draft, target)]
    missing = [file for file in files if not file.exists()]
    if len(missing) == 1:
        raise ConfigError(f"{names} cannot be compared: {missing[0]} is missing; take it from the model's own release")
    if missing or files[0].read_bytes() == files[1].read_bytes():
        return
    if _token_ids(files[0]) != _token_ids(files[1]):
        raise ConfigError(f"{names} have different tokenizers; use a draft model of the target's family")


def _token_ids(file: Path) -> object:
    """Vocabulary and added tokens of a tokenizer.json, which may differ in layout alone."""
    raw = read_json(file, "it maps text to token ids")
    added = {token["content"]: token["id"] for token in raw.get("added_tokens") or []}
    return raw.get("model", {}).get("vocab"), raw.get("model", {}).get("merges"), added
