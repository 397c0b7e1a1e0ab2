"""Which proposers a model's files allow, and how each that has weights is built.

These are MTP modules, EAGLE-3 and DFlash heads, independent draft models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from skipstone.errors import CheckpointError, ConfigError
from skipstone.models.base import CausalLM
from skipstone.models.dflash import Dflash, read_dflash
from skipstone.models.eagle3 import Eagle3, read_eagle3
from skipstone.models.loader import Model, ModelInfo, Place, load, read_json, read_model_info
from skipstone.models.locate import head_folder, heads_beside
from skipstone.models.mtp import MtpHead, count_modules
from skipstone.models.stored import StoredWeights, match_weights, open_weights
from skipstone.registry import PROPOSERS
from skipstone.spec.dflash import DflashProposer
from skipstone.spec.draft_model import DraftModelProposer
from skipstone.spec.hidden_state import HiddenStateProposer
from skipstone.spec.proposer import Proposer
from skipstone.spec.several_modules import SeveralModulesProposer
from skipstone.spec_config import SpecConfig


class Candidate(msgspec.Struct, frozen=True):
    """One proposer, and whether a model has what it needs; `spec` names it, without a number of drafts."""

    method: str
    spec: str
    works: bool
    reason: str


def candidates(info: ModelInfo) -> list[Candidate]:
    """Every proposer in the registry, in its order, and whether this model has what it needs."""
    beside, found = heads_beside(info.folder), []
    for method, row in PROPOSERS.items():
        spec, works, reason = method, True, "needs no weights"
        if method == "mtp":
            modules = count_mtp_modules(info, info.weights)
            works, reason = modules > 0, f"the files hold {modules} MTP module{'' if modules == 1 else 's'}"
        elif method in beside:
            reason = f"in {beside[method]}"
        elif row.heads:
            spec, works = f"{method}:FOLDER", False
            reason = f"no folder {info.folder.name}-{method} beside the model; name one as {spec}"
        found.append(Candidate(method, spec, works, reason))
    return found


def count_mtp_modules(info: ModelInfo, weights: StoredWeights | None) -> int:
    """MTP modules that the model's files hold."""
    layout = info.model_class.mtp
    if layout is None or weights is None:
        return int(info.config.declared_mtp_modules) if layout else 0
    return count_modules(layout, weights.tensors, info.config.num_layers)


@dataclass(frozen=True)
class BuildContext:
    """What a proposer is built from; `place` None: without memory, to see whether its files fit."""

    info: ModelInfo
    target: CausalLM
    max_position: int
    place: Place | None

    @property
    def dtype(self) -> torch.dtype:
        """Of the target's weights, and so of a draft head's."""
        return self.target.embed.dtype

    def load(self, make: Callable[[], Model], stored: StoredWeights | None) -> Model:
        """What `make` makes, with its weights if there is a place for them. Errors as in `models.loader.load`."""
        if self.place is not None:
            return load(make, stored, self.place)
        with torch.device("meta"):
            model = make()
        if stored is not None and (error := match_weights(model, stored).error) is not None:
            raise error
        return model


def make_mtp(spec: SpecConfig, context: BuildContext) -> Proposer:
    """The MTP modules that stand in the model's own files."""
    info, weights = context.info, context.info.weights
    if info.model_class.mtp is None:
        others = ", ".join(method for method in PROPOSERS if method != "mtp")
        raise ConfigError(f"spec=mtp: {info.architecture} has no MTP modules; use one of {others}")
    found = count_mtp_modules(info, weights)
    if not found:
        raise ConfigError(
            f"spec=mtp: config.json of {info.folder.name} declares {info.config.declared_mtp_modules} MTP modules, but "
            "the files hold no MTP tensors; use another proposer or spec=off"
        )
    names = weights.tensors if weights else ()
    head = context.load(lambda: MtpHead(context.target, found, context.dtype, False, names), weights)
    return (HiddenStateProposer if found == 1 else SeveralModulesProposer)("mtp", head)


def make_eagle3(spec: SpecConfig, context: BuildContext) -> Proposer:
    """An EAGLE-3 head, in the hub's layout or that of the speculators library."""
    folder, raw, where = _open_head(spec, context.info)
    config, weights = read_eagle3(raw, context.info.config, where), open_weights(folder, raw)
    given = (context.target, weights.tensors, context.dtype, context.max_position)
    with _naming(folder):
        proposer = HiddenStateProposer("eagle3", context.load(lambda: Eagle3(config, *given), weights))
    proposer.needs = proposer.needs._replace(default_k=_declared_k(raw, where))
    return proposer


def make_dflash(spec: SpecConfig, context: BuildContext) -> Proposer:
    """A DFlash head."""
    folder, raw, where = _open_head(spec, context.info)
    config, given = read_dflash(raw, context.info.config, where), (context.target, context.dtype, context.max_position)
    with _naming(folder):
        return DflashProposer(context.load(lambda: Dflash(config, *given), open_weights(folder, raw)))


def make_draft(spec: SpecConfig, context: BuildContext) -> Proposer:
    """Any language model of the registry that has the target's vocabulary."""
    folder = head_folder("draft", spec.folder, context.info.folder)
    try:
        info = read_model_info(folder)
    except CheckpointError as error:
        raise CheckpointError(f"spec=draft: {error}") from None
    _compare_vocabularies(info, context.info)
    longest = min(info.config.max_position_embeddings, context.max_position)
    model = context.load(lambda: info.model_class(info.config, context.dtype, False, longest), info.weights)
    return DraftModelProposer(model, longest)


def head_method(raw: dict[str, Any]) -> str | None:
    """The method that the config.json of a draft head or a draft model is for."""
    names = raw.get("architectures")
    found = raw.get("speculators_model_type") or (names[0] if isinstance(names, list) and names else None)
    return next((method for method, row in PROPOSERS.items() if str(found) in row.heads), None)


def _open_head(spec: SpecConfig, target: ModelInfo) -> tuple[Path, dict[str, Any], str]:
    """A head's folder, its config.json, and the latter's name for messages. Raises ConfigError or CheckpointError."""
    folder = head_folder(spec.method, spec.folder, target.folder)
    raw = read_json(folder / "config.json", "a draft head's folder needs the config.json of its release")
    where, found = f"{folder.name}/config.json", head_method(raw)
    if found != spec.method:
        key = "speculators_model_type" if raw.get("speculators_model_type") is not None else "architectures"
        hint = f"use {found}:FOLDER:K for it" if found else f"it must be {' or '.join(PROPOSERS[spec.method].heads)}"
        raise ConfigError(f"{where}: {key}={raw.get(key)!r} does not fit spec={spec.method}; {hint}")
    return folder, raw, where


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    """What is wrong with the files of a head, with its folder."""
    try:
        yield
    except CheckpointError as error:
        text = str(error)
        where = "" if str(folder) in text else f"{folder}: "
        raise CheckpointError(f"{where}{text}; is this a complete head for this model?") from None


def _declared_k(raw: dict[str, Any], where: str) -> int | None:
    """Drafts a step that the speculators config proposes."""
    declared = raw.get("speculators_config")
    methods = declared.get("proposal_methods") if isinstance(declared, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    k = first.get("speculative_tokens") if isinstance(first, dict) else None
    if k is None:
        return None
    if not isinstance(k, int) or k < 1:
        raise ConfigError(f"{where}: speculative_tokens={k!r} must be a whole number of at least 1; fix it")
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
