"""Which proposers a model's files allow, found without loading anything: for `check`, `tune` and `inspect`."""

from __future__ import annotations

import msgspec

from skipstone.models.loader import ModelInfo
from skipstone.models.locate import heads_beside
from skipstone.models.mtp import count_modules
from skipstone.models.stored import StoredWeights
from skipstone.registry import PROPOSERS


class Candidate(msgspec.Struct, frozen=True):
    """One proposer, and whether a model has what it needs; `spec` names it, without a number of drafts."""

    method: str
    spec: str
    works: bool
    reason: str


def count_mtp_modules(info: ModelInfo, weights: StoredWeights | None) -> int:
    """MTP modules that the model's files hold."""
    layout = info.model_class.mtp
    if layout is None or weights is None:
        return int(info.config.declared_mtp_modules) if layout else 0
    return count_modules(layout, weights.tensors, info.config.num_layers)


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
