"""What a draft head's or draft model's folder holds, checked against its target without loading either."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import msgspec
import torch

from skipstone.errors import SkipstoneError
from skipstone.kernels.dispatch import choose_device, choose_dtype
from skipstone.models.base import CausalLM
from skipstone.models.loader import ModelInfo, read_model_info
from skipstone.models.locate import heads_beside
from skipstone.models.stored import Match, open_weights
from skipstone.registry import PROPOSERS
from skipstone.runtime.proposers import BuildContext, Candidate
from skipstone.spec_config import SpecConfig, needs_folder


class HeadReport(msgspec.Struct, frozen=True):
    """What `skipstone inspect` shows of a draft head's folder."""

    folder: str
    method: str
    target: str
    files: int
    bytes_on_disk: int
    stored_dtypes: dict[str, int]
    drafting: str
    problem: str | None

    @property
    def loads(self) -> bool:
        """Whether it can be used with its target."""
        return self.problem is None


def check_candidate(candidate: Candidate, info: ModelInfo, model: CausalLM, mtp: Match) -> Candidate:
    """A candidate whose files are looked into; `model` is the target without memory, `mtp` how its modules match."""
    method, said = candidate.method, ""
    try:
        if method == "mtp" and candidate.works and mtp.error is not None:
            raise mtp.error
        if needs_folder(method) and candidate.works:
            said = check_folder(method, heads_beside(info.folder)[method], info, model)
    except SkipstoneError as error:
        return msgspec.structs.replace(candidate, works=False, reason=str(error))
    return msgspec.structs.replace(candidate, reason=f"{candidate.reason}: {said}") if said else candidate


def check_folder(method: str, folder: Path, info: ModelInfo, model: CausalLM) -> str:
    """What a user should know of a head or draft model; `model` is the target without memory. Raises as loading it."""
    longest = info.config.max_position_embeddings
    spec = SpecConfig(method=method, folder=str(folder))
    needs = PROPOSERS[method].load()(spec, BuildContext(info, model, longest, None)).needs
    drafts = [f"at most {needs.max_k} drafts"] if needs.max_k else []
    return "; ".join([part for part in (needs.describe(longest), *drafts) if part])


def examine_head(method: str, folder: Path, target: Path, dtype: str, device: str) -> HeadReport:
    """Look into a head's folder, and check it against its target.

    Raises CheckpointError, ConfigError and UnsupportedError for the target, and for files that cannot be read.
    """
    info = read_model_info(target)
    with torch.device("meta"):
        model: CausalLM = info.model_class(info.config, choose_dtype(dtype, choose_device(device)), True, 1)
    stored = open_weights(folder, {})
    drafting, problem = "", None
    try:
        drafting = check_folder(method, folder, info, model)
    except SkipstoneError as error:
        problem = str(error)
    return HeadReport(
        folder=str(folder),
        method=method,
        target=str(target),
        files=len(stored.files),
        bytes_on_disk=sum(file.stat().st_size for file in stored.files),
        stored_dtypes=dict(Counter(tensor.dtype for tensor in stored.tensors.values()).most_common()),
        drafting=drafting,
        problem=problem,
    )
