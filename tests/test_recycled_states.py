"""What MTP modules hand on from one draft to the next, computed by hand from the checkpoint's tensors."""

from __future__ import annotations

import pytest
import torch
from oracles.speculation import Folders, load
from oracles.tiny import TINY
from oracles.tiny_heads import with_mtp

EPS = 1e-6


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("heads"))


@pytest.mark.parametrize("modules", [1, 3])
@pytest.mark.parametrize(
    ("name", "norm", "offset", "head"),
    [
        ("dsa", "model.layers.{layer}.shared_head.norm.weight", 0.0, "lm_head.weight"),
        ("m3", "language_model.model.mtp.layers.{module}.final_layernorm.weight", 1.0, "language_model.lm_head.weight"),
    ],
)
def test_mtp_modules_hand_on_what_their_logits_are_made_of(
    name: str, norm: str, offset: float, head: str, modules: int, folders: Folders
) -> None:
    """The state after the module's final norm."""
    tensors = with_mtp(TINY[name](), modules).tensors
    drafter = load(folders.target(name, modules), f"mtp:{modules}").engine.runner.proposer.head
    states = 3 * torch.randn(5, 64, generator=torch.Generator().manual_seed(modules))
    for module in range(modules):
        gain = tensors[norm.format(layer=4 + module, module=module)].float() + offset
        normed = states / (states.square().mean(dim=1, keepdim=True) + EPS).sqrt() * gain
        output = drafter.outputs(states, module)
        torch.testing.assert_close(output.recycled, normed)
        torch.testing.assert_close(output.logits, normed @ tensors[head].float().t(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(drafter.recycled(states, module), normed)
