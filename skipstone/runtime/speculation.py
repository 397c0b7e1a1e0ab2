"""From the `spec` option to a proposer, looking at tensors rather than at the config; says what it chose and why."""

from __future__ import annotations

from typing import Any, NamedTuple

from skipstone.config import EngineConfig, read_spec
from skipstone.errors import ConfigError, UnsupportedError
from skipstone.models.loader import ModelInfo
from skipstone.registry import PROPOSERS
from skipstone.runtime.k_table import KTable, asked_spec
from skipstone.runtime.proposers import BuildContext, count_mtp_modules
from skipstone.spec.draft_sampler import DraftSampling
from skipstone.spec.proposer import Proposer
from skipstone.spec.verify import Verifier


class Speculation(NamedTuple):
    """What the engine drafts with. `k` drafts a step for requests that do not say otherwise."""

    proposer: Proposer | None
    k: int
    reason: str
    draft_sampling: DraftSampling
    verifier: Verifier
    table: KTable | None = None
    adapts: bool = False  # whether k is chosen in every step from what was measured

    @property
    def description(self) -> str:
        """For the start-up card."""
        if self.proposer is None:
            return f"off ({self.reason})"
        by_size = "k up to {} by batch size" if self.table else "k = {}"
        drafts = ("k from 0 to {}, as it pays" if self.adapts else by_size).format(self.k)
        text = f"{self.proposer.needs.name}, {drafts} ({self.reason}); {self.draft_sampling} drafts"
        if self.verifier.rule != "exact":
            text += f"; verified by {self.verifier.rule}: the text depends on the drafts, its distribution does not"
        return text + ("; SIMULATED acceptance: the text means nothing" if self.simulated else "")

    @property
    def simulated(self) -> bool:
        """Whether acceptance is made up."""
        return self.verifier.rates is not None


def make_speculation(config: EngineConfig, context: BuildContext) -> Speculation:
    """Build the proposer that `config.spec` names.

    Raises ConfigError, CheckpointError, or UnsupportedError naming both features that cannot work together.
    """
    spec, table = asked_spec(config)
    given = spec.acceptance_rates
    # Of each draft, where those before it were accepted.
    rates = given and [rate / before if before else 0.0 for rate, before in zip(given, [1.0, *given], strict=False)]
    method, reason = spec.method, "as asked"
    if method == "auto":
        method, reason = _choose(context.info)
    verification: Any = spec.verification or config.verification or "exact"
    asked: Any = spec.draft_sampling or config.draft_sampling
    needs_distributions = verification != "exact" and rates is None
    if needs_distributions and asked == "coupled":
        raise UnsupportedError(
            f"draft_sampling=coupled and verification={verification} cannot work together: coupled drafts share the "
            "target's noise, and that rule needs drafts that do not; use independent or greedy, or verification=exact"
        )
    sampling: Any = asked or ("independent" if needs_distributions else "coupled")
    verifier = Verifier(verification, rates)
    if method == "off" or spec.k == 0:
        if rates is not None:
            raise ConfigError(
                f"spec={config.spec!r} makes no drafts, so simulate_acceptance has nothing to accept; leave one out"
            )
        options = {"verification": verification if verification != "exact" else None, "draft_sampling": asked}
        idle = "".join(f"; {name}={value} has no effect" for name, value in options.items() if value)
        why = (reason if method == "off" else "k = 0") + idle
        return Speculation(None, 0, why, "coupled", Verifier())
    proposer: Proposer = PROPOSERS[method].load()(spec, context)
    most = proposer.needs.max_k
    usual = proposer.needs.default_k or PROPOSERS[method].default_k
    k = spec.k or min(usual, most or usual)
    if most is not None and k > most:
        raise ConfigError(f"spec={config.spec!r}: k={k} is more than {method} can draft at once; at most {most}")
    # Under the other rules the text depends on the drafts, and would on times. On a GPU it has not been measured.
    on_cpu = context.target.embed.device.type == "cpu"
    adapts = on_cpu and read_spec(config).method == "auto" and verification == "exact"
    reason = f"by {config.k_table}" if table else reason
    return Speculation(proposer, k, reason, sampling, verifier, table, adapts)


def _choose(info: ModelInfo) -> tuple[Any, str]:
    """MTP modules when the files hold any; config.json may declare modules that were never released."""
    found = count_mtp_modules(info, info.weights)
    if found:
        return "mtp", f"auto: the files hold {found} MTP module{'s' if found > 1 else ''}"
    declared = info.config.declared_mtp_modules
    but = f"config.json declares {declared} MTP modules, but " if declared else ""
    return "off", f"auto: {but}the files hold no MTP tensors"
