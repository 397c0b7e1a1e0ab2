"""Slices of the two releases for benchmarks: real dimensions, few layers and experts, weights drawn at random.

`bench decode` and `bench load` build their engines here and step them by hand.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from skipstone.config import EngineConfig
from skipstone.core.request import Request, SamplingParams
from skipstone.errors import ConfigError
from skipstone.models.loader import ModelInfo
from skipstone.registry import MODELS
from skipstone.runtime.engine import Engine

_SPARSE_LAYERS = [0] + [1] * 7
SLICES: dict[str, dict[str, Any]] = {
    "m3": {
        "architectures": ["MiniMaxM3SparseForCausalLM"], "num_mtp_modules": 1,
        "vocab_size": 200064, "max_position_embeddings": 262144, "hidden_size": 6144, "num_hidden_layers": 8,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "rotary_dim": 64,
        "partial_rotary_factor": 0.5, "rope_theta": 5e6, "rms_norm_eps": 1e-6,
        "hidden_act": "swigluoai", "dense_intermediate_size": 12288, "intermediate_size": 3072,
        "shared_intermediate_size": 3072, "num_local_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 1,
        "routed_scaling_factor": 2.0, "moe_layer_freq": _SPARSE_LAYERS,
        "sparse_attention_config": {
            "use_sparse_attention": True, "sparse_attention_freq": _SPARSE_LAYERS, "sparse_block_size": 128,
            "sparse_topk_blocks": 16, "sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_init_block": 0,
            "sparse_local_block": 1,
        },
    },
    "v32": {
        "architectures": ["DeepseekV32ForCausalLM"], "num_nextn_predict_layers": 1,
        "vocab_size": 129280, "max_position_embeddings": 163840, "hidden_size": 7168, "num_hidden_layers": 5,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048,
        "hidden_act": "silu", "first_k_dense_replace": 1, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_routed_experts": 32, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    },
}  # fmt: skip


def slice_engine(name: str, spec: str, acceptance: str, **options: Any) -> Engine:
    """An engine of a slice; where it drafts, acceptance is simulated. Raises ConfigError for an unknown name."""
    if name not in SLICES:
        raise ConfigError(f"--slice {name} is not known; there are " + ", ".join(SLICES))
    if spec != "off":
        options["simulate_acceptance"] = acceptance
    config = EngineConfig(model=f"slice {name}", prefix_caching=False, spec=spec, **options)
    raw = SLICES[name]
    architecture = raw["architectures"][0]
    model_class = MODELS.load(architecture)
    own = model_class.read_config(raw)
    torch.manual_seed(0)  # the weights
    return Engine(ModelInfo(Path(f"slice-{name}"), architecture, raw, model_class, own, random_weights=True), config)


def random_request(engine: Engine, name: str, prompt: int, output: int, seed: int, **sampling: Any) -> Request:
    """A greedy request for `output` tokens after `prompt` random ones."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(engine.vocab_size, (prompt,), generator=generator).tolist()
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True, **sampling)
    return Request(name, ids, params, seed, prompt + output)


def reach_decoding(engine: Engine) -> None:
    """Step until every request has written a few tokens."""
    while engine.scheduler.waiting or any(request.num_output_tokens < 4 for request in engine.scheduler.running):
        engine.step()


def mean_seconds(call: Callable[[], object], count: int) -> float:
    """Seconds of each of `count` calls, until the GPU has done what they asked for."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / count
