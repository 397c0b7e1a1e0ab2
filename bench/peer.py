"""transformers on the same weights, as the peer of the CPU benchmarks. Needs the `test` extra."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

ROOT = Path(__file__).resolve().parent.parent


def load_peer(folder: Path) -> nn.Module:
    """The folder's model in transformers, float32, with transformers' own default kernels."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    raw = json.loads((folder / "config.json").read_text())
    if "text_config" not in raw:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as m3
    from transformers.models.minimax_m3_vl.configuration_minimax_m3_vl import MiniMaxM3VLTextConfig

    sys.path.insert(0, str(ROOT / "training"))
    from crosscheck import merge_m3

    keys = {key: value for key, value in raw["text_config"].items() if key != "architectures"}
    # Built through from_config so that transformers chooses its own attention and expert kernels.
    model = m3.MiniMaxM3VLForCausalLM._from_config(MiniMaxM3VLTextConfig(**keys), dtype=torch.float32)
    tensors = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(shard)
    model.load_state_dict(merge_m3(tensors), strict=True)
    return model.eval()


def peer_generate(model: nn.Module, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy continuations, prompts padded on the left as transformers wants them."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return out[:, longest:].tolist()
