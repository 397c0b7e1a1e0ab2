"""Which proposers a model's files allow, found without loading anything: for `check`, `tune` and `inspect`."""

from __future__ import annotations

from typing import NamedTuple

from skipstone.models.loader import ModelInfo
from skipstone.models.locate import heads_beside
from skipstone.models.stored import StoredWeights
from skipstone.registry import DRAFT_HEADS, PROPOSERS


class Candidate(NamedTuple):
    """One proposer for a model. `spec` is what the option of that name takes, without a number of drafts."""

    method: str
    spec: str
    works: bool
    reason: str


def count_mtp_modules(info: ModelInfo, weights: StoredWeights | None) -> int:
    """MTP modules that the model's files hold."""
    if info.architecture not in DRAFT_HEADS.entries:
        return 0
    if weights is None:
        return int(info.config.declared_mtp_modules)
    count: int = DRAFT_HEADS.load(info.architecture).count_modules(weights.tensors, info.config.num_layers)
    return count


def candidates(info: ModelInfo) -> list[Candidate]:
    """Every proposer in the registry, in its order, and whether this model has what it needs."""
    modules, beside = count_mtp_modules(info, info.weights), heads_beside(info.folder)
    found = []
    for method, row in PROPOSERS.items():
        if method == "mtp":
            held = f"the files hold {modules} MTP module{'' if modules == 1 else 's'}"
            found.append(Candidate(method, method, modules > 0, held))
        elif not row.heads:
            found.append(Candidate(method, method, True, "needs no weights"))
        elif method in beside:
            found.append(Candidate(method, method, True, f"in {beside[method]}"))
        else:
            looked = f"no folder {info.folder.name}-{method} beside the model; name one as {method}:FOLDER"
            found.append(Candidate(method, f"{method}:FOLDER", False, looked))
    return found
