"""Tables from a name to what implements it, loaded on first use. One line here adds a model, backend or proposer."""

from __future__ import annotations

import difflib
import importlib
from typing import Any, NamedTuple

from skipstone.errors import UnsupportedError


def attribute(path: str) -> Any:
    """What "module:attribute" below the package names."""
    module, name = path.split(":")
    return getattr(importlib.import_module(f"skipstone.{module}"), name)


class Registry:
    """Names to "module:attribute" strings below the package; nothing is imported before `load`."""

    def __init__(self, kind: str, entries: dict[str, str]) -> None:
        self.kind = kind
        self.entries = entries

    def load(self, name: str) -> Any:
        """Return the attribute behind a name. Raises UnsupportedError that lists the known names."""
        if name not in self.entries:
            known = ", ".join(sorted(self.entries))
            near = difflib.get_close_matches(name, self.entries, n=1)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise UnsupportedError(f"{self.kind} {name!r} is not supported{hint} Known: {known}")
        return attribute(self.entries[name])


MODELS = Registry(
    "architecture",
    {
        "MiniMaxM3SparseForConditionalGeneration": "models.minimax_m3:MiniMaxM3",
        "MiniMaxM3SparseForCausalLM": "models.minimax_m3:MiniMaxM3",
        "DeepseekV32ForCausalLM": "models.deepseek_v32:DeepseekV32",
    },
)

ATTENTION = Registry(
    "attention backend",
    {
        "dense": "attention.dense:DenseBackend",
        "msa": "attention.msa:BlockSparseBackend",
        "msa_paged": "attention.msa_paged:PagedBlockSparseBackend",
        "msa_aiter": "attention.msa_aiter:AiterBlockSparseBackend",
        "msa_index": "attention.msa:BlockIndexBackend",
        "dsa": "attention.dsa:TokenSparseBackend",
        "dsa_index": "attention.dsa:TokenIndexBackend",
    },
)

# What serves the layers of a backend better, where it does not refuse their caches.
PREFERRED = {"msa": "msa_aiter"}


class ProposerRow(NamedTuple):
    """All that is known of a proposer before anything is loaded: forms, messages, defaults are made from it.

    `build` names what takes a SpecConfig and BuildContext and gives the Proposer. `heads`: what the config.json of its
    folder may call it; without any it needs no folder. `peers`: other programs' names for it.
    """

    build: str
    default_k: int = 3
    heads: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()

    def load(self) -> Any:
        """What builds it."""
        return attribute(self.build)


# By the method that a user names.
PROPOSERS = {
    "mtp": ProposerRow("runtime.proposers:make_mtp", peers=("deepseek_mtp", "minimax_m3_mtp")),
    "ngram": ProposerRow("spec.ngram:make_ngram", 4),
    "eagle3": ProposerRow("runtime.proposers:make_eagle3", heads=("LlamaForCausalLMEagle3", "eagle3")),
    "dflash": ProposerRow("runtime.proposers:make_dflash", heads=("DFlashDraftModel",)),
    "draft": ProposerRow("runtime.proposers:make_draft", 4, heads=tuple(MODELS.entries), peers=("draft_model",)),
}

# What only a GPU needs of the engine.
GPU = Registry(
    "part for GPUs",
    {
        "graphs": "runtime.graphs:DecodeGraphs",
        "warm_up": "runtime.warmup:warm_up",
        "measure_budget": "runtime.dry_run:measure_budget",
        "compilations": "kernels.gpu.compilations:num_compilations",
    },
)

# Rules of verification that look at distributions.
VERIFICATION = Registry(
    "rule", {"rejection": "spec.rejection:rejection_sample", "block": "spec.rejection:block_verify"}
)

# By the package that does the parsing.
GRAMMARS = Registry("grammar library", {"llguidance": "text.structured:GrammarCompiler"})

# Every op twice, its plain-torch reference and its Triton kernels; some a third time, compiled for CPUs by Numba.
_FOLDERS = {"reference": "reference", "triton": "gpu", "numba": "cpu"}
KERNELS = Registry(
    "op",
    {
        f"{op}/{implementation}": f"kernels.{folder}.{module}:{op}"
        for op, *modules in [
            ("linear", "gemm", "gemm", "gemm"),
            ("bmm", "gemm", "gemm", "gemm"),
            ("rms_norm", "pointwise", "norm_rope", "norm_rope"),
            ("add_rms_norm", "norm_rope", "norm_rope", "norm_rope"),
            ("rotate", "pointwise", "norm_rope", "norm_rope"),
            ("norm_rotate_store", "norm_rope", "norm_rope", "norm_rope"),
            ("index_rows", "index_rows", "index_rows", "norm_rope"),
            ("gated", "norm_rope", "norm_rope", "norm_rope"),
            ("store", "kv_store", "kv_store", "norm_rope"),
            ("route", "moe", "moe", "moe"),
            ("experts_forward", "moe", "moe", "moe"),
            ("dense_attention", "attention", "dense_attn", "attention"),
            ("block_select", "select", "select", "select"),
            ("token_select", "select", "token_select", "select"),
            ("sparse_gqa", "attention", "sparse_gqa", "attention"),
            ("sparse_mla", "attention", "sparse_mla", "attention"),
            ("verify_page_table", "block_table", "block_table"),
            ("prefill_page_table", "block_table", "block_table"),
            ("paged_attention", "block_table", "block_table"),
            ("sample", "sampling", "sampling", "sampling"),
            ("step_rows", "decode", "decode", "decode"),
            ("accept", "decode", "decode", "decode"),
        ]
        for (implementation, folder), module in zip(_FOLDERS.items(), modules, strict=False)
    },
)
