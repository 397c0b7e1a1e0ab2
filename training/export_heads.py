"""Draft heads <-> folders in the public layouts (`LlamaForCausalLMEagle3`, `DFlashDraftModel`).

    python training/export_heads.py --head eagle3 --random --out /tmp/demo-eagle3     # seeded random weights, same layout

Tensor names are those of the modules in heads.py; floats are stored as bfloat16.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from heads import Dflash, DflashConfig, Eagle3, Eagle3Config

HEADS = {"eagle3": (Eagle3, Eagle3Config), "dflash": (Dflash, DflashConfig)}
FILE = "model.safetensors"


def common_config(cfg: Eagle3Config | DflashConfig) -> dict:
    return {
        "torch_dtype": "bfloat16", "hidden_size": cfg.hidden, "intermediate_size": cfg.width, "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads, "head_dim": cfg.head_dim, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": cfg.rope_theta,
        "rope_scaling": None, "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "initializer_range": 0.02,
        "vocab_size": cfg.vocab, "max_position_embeddings": cfg.max_positions, "tie_word_embeddings": False, "use_cache": True,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }


def config_of(head: Eagle3 | Dflash) -> dict:
    """What config.json says."""
    cfg = head.cfg
    if isinstance(cfg, Eagle3Config):
        taps = {"eagle_aux_hidden_state_layer_ids": sorted(cfg.taps), "use_aux_hidden_state": True}
        return {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, "draft_vocab_size": cfg.draft_vocab,
                "eagle_config": taps} | common_config(cfg)
    taps = {"mask_token_id": cfg.mask_token, "target_layer_ids": sorted(cfg.taps)}
    return {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "num_hidden_layers": cfg.layers, "block_size": cfg.block,
            "dflash_config": taps, "num_target_layers": 6, "layer_types": ["full_attention"] * cfg.layers, "use_sliding_window": False,
            } | common_config(cfg)


def to_tensors(head: nn.Module) -> dict[str, Tensor]:
    """Checkpoint tensors: bfloat16, but d2t int64 and t2d bool."""
    tensors = {name: value.detach().cpu() for name, value in head.state_dict().items()}
    return {n: (t.bfloat16() if t.is_floating_point() else t).contiguous() for n, t in tensors.items()}


def write_head(head: Eagle3 | Dflash, out: Path) -> None:
    """config.json and the weights; the weights appear whole, by a rename."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config_of(head), indent=1) + "\n")
    save_file(to_tensors(head), out / (FILE + ".part"), metadata={"format": "pt"})
    (out / (FILE + ".part")).chmod(0o644)
    (out / (FILE + ".part")).rename(out / FILE)


def read_config(folder: Path) -> Eagle3Config | DflashConfig:
    raw = json.loads((folder / "config.json").read_text())
    shape = {"hidden": raw["hidden_size"], "heads": raw["num_attention_heads"], "kv_heads": raw["num_key_value_heads"], "head_dim": raw["head_dim"],
             "width": raw["intermediate_size"], "vocab": raw["vocab_size"], "rope_theta": raw["rope_theta"], "max_positions": raw["max_position_embeddings"]}
    if raw["architectures"] == ["LlamaForCausalLMEagle3"]:
        taps = tuple(raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        return Eagle3Config(**shape, draft_vocab=raw["draft_vocab_size"], taps=taps)
    dflash = raw["dflash_config"]
    return DflashConfig(**shape, layers=raw["num_hidden_layers"], block=raw["block_size"], mask_token=dflash["mask_token_id"],
                        taps=tuple(dflash["target_layer_ids"]))


def load_head(folder: Path, device: str = "cpu") -> Eagle3 | Dflash:
    """The head in fp32 from an exported folder; every tensor must be there and have a place."""
    cfg = read_config(folder)
    head = (Eagle3 if isinstance(cfg, Eagle3Config) else Dflash)(cfg)
    head.load_state_dict({n: t.float() if t.is_floating_point() else t for n, t in load_file(folder / FILE).items()}, strict=True)
    return head.eval().to(device)


def frequent_ids(counts: np.ndarray, size: int) -> Tensor:
    """The `size` most frequent token ids, rising; counts [V]."""
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]).copy())


def main() -> None:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--head", choices=HEADS, required=True)
    parser.add_argument("--random", action="store_true", required=True)
    parser.add_argument("--data", type=Path, default=here / ".data")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.manual_seed(0)
    cls, config = HEADS[options.head]
    head = cls(config())
    if options.head == "eagle3":
        counts = np.bincount(np.fromfile(options.data / "train.bin", dtype=np.uint16), minlength=head.cfg.vocab)
        head.set_vocabulary(frequent_ids(counts, head.cfg.draft_vocab))
    write_head(head, options.out)
    print(f"{options.out}: {sum(p.numel() for p in head.parameters()) / 1e6:.2f} M parameters, {(options.out / FILE).stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
