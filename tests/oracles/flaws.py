"""Single mistakes, made in the other library's model. A comparison that does not notice one of them is worthless.

`INDEX_FLAWS` name mistakes of the index branch, which `Reference` takes by name; they show beyond the budget only.
`MODEL_FLAWS` change a loaded `Reference` in place.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from oracles.reference import Reference

INDEX_FLAWS = [
    ("dsa", "dense"), ("dsa", "interleaved"), ("dsa", "no bias"), ("dsa", "no relu"), ("dsa", "positive weights"),
    ("m3", "dense"), ("m3", "interleaved"), ("m3", "soft maximum"), ("m3", "one group"),
    ("m3_mixed", "dense"), ("m3_mixed", "one local"), ("m3_init", "dense"), ("m3_init", "no init"),
]  # fmt: skip


def _parts(reference: Reference, kind: str) -> list[nn.Module]:
    """The modules whose class name ends in `kind`."""
    return [m for m in reference.model.modules() if type(m).__name__.endswith(kind)]


def no_routing_bias(reference: Reference) -> None:
    """Experts chosen by score alone."""
    for router in _parts(reference, "Router"):
        router.e_score_correction_bias.zero_()


def no_group_limit(reference: Reference) -> None:
    """Experts of every group may be chosen."""
    for router in _parts(reference, "Router"):
        router.topk_group = router.num_group


def unscaled_experts(reference: Reference) -> None:
    """The routed sum is not multiplied."""
    for part in _parts(reference, "Router") + _parts(reference, "SparseMoeBlock"):
        part.routed_scaling_factor = 1.0


def unnormalised_weights(reference: Reference) -> None:
    """Routing weights that do not sum to one."""
    for router in _parts(reference, "Router"):
        router.norm_topk_prob = False


def no_clamp(reference: Reference) -> None:
    """The activation's limit is ignored."""
    for part in _parts(reference, "Experts") + _parts(reference, "DenseMLP"):
        part.swiglu_limit = 1e9


def sigmoid_gain_of_one(reference: Reference) -> None:
    """Plain SiLU where the activation has a gain inside the sigmoid."""
    for part in _parts(reference, "Experts") + _parts(reference, "DenseMLP"):
        part.swiglu_alpha = 1.0


def plain_gain(reference: Reference) -> None:
    """Norm weights used as they are stored, without the one that Gemma's norm adds."""
    for norm in _parts(reference, "RMSNorm"):
        norm.weight.sub_(1)


def no_head_norm(reference: Reference) -> None:
    """The gains of the per-head norms are left out."""
    for layer in reference.layers:
        layer.self_attn.q_norm.weight.zero_()
        layer.self_attn.k_norm.weight.zero_()


def no_latent_norm(reference: Reference) -> None:
    """The gain of the latent's norm is left out."""
    for layer in reference.layers:
        layer.self_attn.kv_a_layernorm.weight.fill_(1)


def no_mscale(reference: Reference) -> None:
    """YaRN's factor is left out of the softmax scale."""
    for layer in reference.layers:
        layer.self_attn.scaling = layer.self_attn.qk_head_dim**-0.5


def no_yarn(reference: Reference) -> None:
    """Rotary frequencies as if the context had never been extended."""
    (rotary,) = _parts(reference, "V32RotaryEmbedding")
    steps = len(rotary.inv_freq)
    rotary.inv_freq.copy_(10000.0 ** (-torch.arange(steps) / steps))


def other_theta(reference: Reference) -> None:
    """A rotary base that the config does not name."""
    (rotary,) = [m for m in _parts(reference, "RotaryEmbedding") if "Vision" not in type(m).__name__]
    rotary.inv_freq.mul_(torch.linspace(1, 0.5, len(rotary.inv_freq)))


def shifted_positions(reference: Reference) -> None:
    """Adjacent positions are only half as far apart."""
    (rotary,) = [m for m in _parts(reference, "RotaryEmbedding") if "Vision" not in type(m).__name__]
    rotary.inv_freq.mul_(0.5)


Flaw = Callable[[Reference], None]
MODEL_FLAWS: list[tuple[str, Flaw]] = [
    ("dsa", no_routing_bias), ("dsa", no_group_limit), ("dsa", unscaled_experts), ("dsa", unnormalised_weights),
    ("dsa", no_latent_norm), ("dsa", no_mscale), ("dsa", no_yarn), ("dsa", other_theta), ("dsa", shifted_positions),
    ("m3", no_routing_bias), ("m3", unscaled_experts), ("m3", no_clamp), ("m3", sigmoid_gain_of_one),
    ("m3", plain_gain), ("m3", no_head_norm), ("m3", other_theta), ("m3", shifted_positions),
]  # fmt: skip
