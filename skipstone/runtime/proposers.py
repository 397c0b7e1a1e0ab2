"""Proposers whose weights lie in a folder of their own: EAGLE-3 and DFlash heads, independent draft models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from skipstone.errors import CheckpointError, ConfigError
from skipstone.models.base import CausalLM
from skipstone.models.dflash import Dflash, DflashConfig, read_dflash
from skipstone.models.eagle3 import Eagle3, Eagle3Config, read_eagle3
from skipstone.models.loader import Build, ModelInfo, build_model, load, read_json, read_model_info
from skipstone.models.locate import head_folder
from skipstone.models.stored import StoredWeights, open_weights
from skipstone.registry import MODELS
from skipstone.runtime.speculation import Surroundings
from skipstone.spec.dflash import DflashProposer
from skipstone.spec.draft_model import DraftModelProposer
from skipstone.spec.hidden_state import HiddenStateProposer
from skipstone.spec.proposer import Proposer
from skipstone.spec_config import SpecConfig


class HeadFolder(NamedTuple):
    """A draft head's folder, its config.json checked against its target; `where` for messages."""

    folder: Path
    raw: dict[str, Any]
    where: str
    config: Eagle3Config | DflashConfig
    weights: StoredWeights

    def make(self, target: CausalLM, dtype: torch.dtype, max_position: int) -> Eagle3 | Dflash:
        """The head without its weights. Raises CheckpointError when the target's cannot replace missing ones."""
        if isinstance(self.config, DflashConfig):
            return Dflash(self.config, target, dtype, max_position)
        return Eagle3(self.config, target, self.weights.tensors, dtype, max_position)


def head_method(raw: dict[str, Any]) -> str | None:
    """The method that the config.json of a draft head or a draft model is for."""
    names = raw.get("architectures")
    found = raw.get("speculators_model_type") or (names[0] if isinstance(names, list) and names else None)
    methods = {"LlamaForCausalLMEagle3": "eagle3", "eagle3": "eagle3", "DFlashDraftModel": "dflash"}
    return (methods | dict.fromkeys(MODELS.entries, "draft")).get(str(found))


def open_head(method: str, folder: Path, target: ModelInfo) -> HeadFolder:
    """Read config.json and headers of an EAGLE-3 or DFlash head. Raises ConfigError or CheckpointError."""
    raw = read_json(folder / "config.json", "a draft head's folder needs the config.json of its release")
    where, found = f"{folder.name}/config.json", head_method(raw)
    if found != method:
        key = "speculators_model_type" if raw.get("speculators_model_type") is not None else "architectures"
        hint = (
            "it must be ['LlamaForCausalLMEagle3'] or speculators' eagle3 for eagle3, ['DFlashDraftModel'] for dflash"
        )
        hint = f"use {found}:FOLDER:K for it" if found else hint
        raise ConfigError(f"{where}: {key}={raw.get(key)!r} does not fit spec={method}; {hint}")
    read = read_dflash if method == "dflash" else read_eagle3
    return HeadFolder(folder, raw, where, read(raw, target.config, where), open_weights(folder, raw))


def open_draft(folder: Path, target: ModelInfo) -> ModelInfo:
    """Read a draft model's config.json. Raises ConfigError unless it has the target's tokens, CheckpointError."""
    try:
        info = read_model_info(folder)
    except CheckpointError as error:
        raise CheckpointError(f"spec=draft: {error}") from None
    _compare_vocabularies(info, target)
    return info


def make_eagle3(spec: SpecConfig, around: Surroundings) -> Proposer:
    """An EAGLE-3 head, in the hub's layout or that of the speculators library."""
    return _make_head("eagle3", spec, around)


def make_dflash(spec: SpecConfig, around: Surroundings) -> Proposer:
    """A DFlash head."""
    return _make_head("dflash", spec, around)


def propose_with(head: HeadFolder, model: Eagle3 | Dflash) -> HiddenStateProposer | DflashProposer:
    """The proposer of a head. Raises ConfigError for a number of drafts in its config.json that makes no sense."""
    if isinstance(model, Dflash):
        return DflashProposer(model)
    proposer = HiddenStateProposer("eagle3", model)
    proposer.needs = proposer.needs._replace(default_k=_declared_k(head))
    return proposer


def make_draft(spec: SpecConfig, around: Surroundings) -> Proposer:
    """Any language model of the registry that has the target's vocabulary."""
    info = open_draft(head_folder("draft", spec.folder, around.info.folder), around.info)
    longest = min(info.config.max_position_embeddings, around.max_position)
    return DraftModelProposer(build_model(info, Build(False, longest, around.place)), longest)


def _make_head(method: str, spec: SpecConfig, around: Surroundings) -> Proposer:
    head = open_head(method, head_folder(method, spec.folder, around.info.folder), around.info)
    given = (around.target, around.place.dtype, around.max_position)
    with naming(head.folder):
        return propose_with(head, load(lambda: head.make(*given), head.weights, around.place))


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """What is wrong with the files of a head, with its folder."""
    try:
        yield
    except CheckpointError as error:
        text = str(error)
        where = "" if str(folder) in text else f"{folder}: "
        raise CheckpointError(f"{where}{text}; is this a complete head for this model?") from None


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
