"""MiniMax-M3's MTP module against its equations: plain torch around a decoder layer of the other library.

Over a whole sequence without caches: the row of position p joins the token at p + 1 with the target's final state at p;
at position 0 the token's embedding is zero. Later drafts are fed the module's own normalised output.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracles.reference import Reference
from oracles.tiny import TINY, Tensors, write_folder
from oracles.tiny_heads import with_mtp
from test_draft_heads import TOLERANCE, Choice, error, record, run
from torch import Tensor

from skipstone import LLM

PREFIX = "language_model.model."
MODULE = f"{PREFIX}mtp.layers.0."
DONATED = 1  # a sparse layer with experts of the target, whose place the module's layer takes in the other library


class Oracle:
    """The equations over whole sequences."""

    def __init__(self, folder: Path) -> None:
        tiny = with_mtp(TINY["m3"](), 1)
        self.tensors: Tensors = {name: tensor.float() for name, tensor in tiny.tensors.items()}
        self.eps = tiny.text["rms_norm_eps"]
        self.zeroed = True  # the embedding at position 0
        plain = with_mtp(tiny, 0)
        self.target = Reference(plain, write_folder(plain, folder / "target"))
        own, layer = f"{MODULE}transformer_layer.", f"{PREFIX}layers.{DONATED}."
        donated = {layer + n.removeprefix(own): t for n, t in tiny.tensors.items() if n.startswith(own)}
        donor = replace(plain, tensors=plain.tensors | donated)
        assert plain.tensors.keys() == donor.tensors.keys()
        self.donor = Reference(donor, write_folder(donor, folder / "donor"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Root-mean-square norm with weights around zero."""
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * (1 + self.tensors[f"{MODULE}{name}.weight"])

    def final_states(self, token_ids: list[int]) -> Tensor:
        """The target's states behind its final norm, [S, H]."""
        states: list[Tensor] = []
        head = self.target.model.lm_head
        handle = head.register_forward_pre_hook(lambda _, args: states.append(args[0][0].detach()))
        self.target.logits(token_ids)
        handle.remove()
        return states[0]

    def layer(self, x: Tensor) -> Tensor:
        """The decoder layer over a sequence that begins at position 0, [S, H] -> [S, H]."""
        layer, outputs = self.donor.layers[DONATED], []

        def enter(_: object, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            return ((x[None], *args[1:]), kwargs) if args else (args, kwargs | {"hidden_states": x[None]})

        def leave(_: object, __: object, output: Tensor | tuple) -> None:
            outputs.append((output if isinstance(output, Tensor) else output[0])[0])

        handles = [
            layer.register_forward_pre_hook(enter, with_kwargs=True),
            layer.register_forward_hook(leave),
        ]
        self.donor.logits([0] * len(x))
        for handle in handles:
            handle.remove()
        return outputs[0]

    def states(self, following: list[int], hidden: Tensor) -> Tensor:
        """The module behind its final norm: token at p + 1 and state at p -> [S, H]."""
        embedded = self.tensors[f"{PREFIX}embed_tokens.weight"][following]
        if self.zeroed:
            embedded[0] = 0
        both = torch.cat([self.norm(embedded, "enorm"), self.norm(hidden, "hnorm")], dim=-1)
        return self.norm(self.layer(both @ self.tensors[f"{MODULE}eh_proj.weight"].T), "final_layernorm")

    def logits(self, choice: Choice) -> Tensor:
        """Of the next draft, [V]."""
        hidden = self.final_states(choice.committed[:-1])
        tokens = choice.committed + choice.drafts
        while len(hidden) < len(tokens) - 1:  # each pass gives one more state that is fed back
            hidden = torch.cat([hidden, self.states(tokens[1 : len(hidden) + 1], hidden)[-1:]])
        return self.states(tokens[1:], hidden)[-1] @ self.tensors["language_model.lm_head.weight"].T


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(tmp_path_factory.mktemp("oracle"))


@pytest.fixture(scope="module")
def choices(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Choice]]:
    """Draft choices of a run over prompts of 1 to 42 tokens."""
    folder = write_folder(with_mtp(TINY["m3"](), 1), tmp_path_factory.mktemp("module") / "m3")

    def make(**options: int) -> list[Choice]:
        llm = LLM(str(folder), spec="mtp:3", **options)
        made = record(llm)
        run(llm, 12)
        assert len(made) > 50 and llm.engine.scheduler.stats.speculation.accepted
        return made

    return make


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 16, "block_size": 8}], ids=["whole", "chunked"])
def test_drafts_come_from_the_equations(
    options: dict[str, int], oracle: Oracle, choices: Callable[..., list[Choice]]
) -> None:
    for choice in choices(**options)[::2]:  # of all three drafts of a step
        assert error(choice.logits, oracle.logits(choice)) < TOLERANCE, (len(choice.committed), len(choice.drafts))


def test_the_comparison_notices_an_embedding_at_position_0(
    oracle: Oracle, choices: Callable[..., list[Choice]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oracle, "zeroed", False)
    short = [choice for choice in choices() if len(choice.committed) < 8]
    assert short and all(error(choice.logits, oracle.logits(choice)) > 10 * TOLERANCE for choice in short)
