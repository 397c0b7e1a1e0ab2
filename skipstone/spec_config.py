"""How a user names a proposer: `mtp:3`, `eagle3:FOLDER:5`, or a JSON object with vLLM's speculative-config keys."""

from __future__ import annotations

from typing import Literal

import msgspec

from skipstone.errors import ConfigError
from skipstone.registry import PROPOSERS

LARGEST_K = 64
DEFAULT_MIN_MATCH, DEFAULT_MAX_MATCH = 2, 5
PEER_SAMPLING = {"greedy": "greedy", "probabilistic": "independent", None: None}
PEER_VERIFICATION = {"standard": "rejection", "block": "block", "synthetic": "exact", None: None}


class SpecConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A proposer as asked for. `k` None: chosen with the proposer, or by a table, which `k_from_table` asks for.

    Rates are unconditional, per draft position.
    """

    method: str
    folder: str | None = None
    k: int | None = None
    k_from_table: bool = False
    min_match: int = DEFAULT_MIN_MATCH
    max_match: int = DEFAULT_MAX_MATCH
    draft_sampling: str | None = None
    verification: str | None = None
    acceptance_rates: list[float] | None = None


class _PeerConfig(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's --speculative-config, the keys that mean the same here."""

    method: str | None = None
    model: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] | None = None
    rejection_sample_method: Literal["standard", "block", "synthetic"] | None = None
    synthetic_acceptance_rates: list[float] | None = None
    synthetic_acceptance_length: float | None = None


def needs_folder(method: str) -> bool:
    """Whether the method's weights lie in a folder of their own."""
    return method in PROPOSERS and bool(PROPOSERS[method].heads)


def methods() -> list[str]:
    """Every method."""
    return ["auto", "off", *PROPOSERS]


def forms() -> str:
    """How each method is written."""
    return ", ".join(["auto, off", *(name + (":FOLDER:K" if row.heads else ":K") for name, row in PROPOSERS.items())])


def parse_spec(text: str) -> SpecConfig:
    """Read the value of `spec`. Raises ConfigError naming the part that is wrong and what is allowed."""
    try:
        spec = _from_peer(text) if text.lstrip().startswith("{") else _from_form(text)
        if spec.k is not None and not 0 <= spec.k <= LARGEST_K:
            raise ValueError(f"k={spec.k} must be between 0 and {LARGEST_K}")
        least, most = spec.min_match, spec.max_match
        if not 1 <= least <= most:
            raise ValueError(f"prompt_lookup_min={least} must be at least 1 and at most prompt_lookup_max={most}")
    except ValueError as error:
        raise ConfigError(f"spec={text!r}: {error}") from None
    if spec.acceptance_rates is not None:
        check_rates(spec.acceptance_rates, text)
    return spec


def _from_form(text: str) -> SpecConfig:
    """Raises ValueError, like `_from_peer`, without the spec's text."""
    method, _, rest = text.strip().partition(":")
    if method not in methods():
        raise ValueError(f"{method!r} is not a proposer; it must be {forms()}, or a JSON object")
    folder, k = rest or None, None
    head, _, tail = rest.rpartition(":")
    if tail.isdecimal():
        folder, k = head or None, int(tail)
    elif tail == "auto":
        folder = head or None
    if folder is not None and not needs_folder(method):
        raise ValueError(f"{method} takes a number of drafts only, as in {method}:3")
    return SpecConfig(method=method, folder=folder, k=k, k_from_table=tail == "auto")


def read_rates(text: str) -> list[float]:
    """The value of `simulate_acceptance`. Raises ConfigError."""
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"simulate_acceptance={text!r} must list numbers, as in 0.8,0.6,0.45") from None
    check_rates(rates, f"simulate_acceptance={text}")
    return rates


def check_rates(rates: list[float], text: str) -> None:
    """Check unconditional acceptance rates per position. Raises ConfigError."""
    falling = all(a >= b for a, b in zip([1.0, *rates], rates, strict=False))
    if not rates or not falling or rates[-1] < 0:
        raise ConfigError(f"acceptance rates in {text!r} must lie between 0 and 1 and never rise, as in 0.8,0.6,0.45")


def _from_peer(text: str) -> SpecConfig:
    try:
        peer = msgspec.json.decode(text, type=_PeerConfig)
    except msgspec.MsgspecError as error:
        known = ", ".join(_PeerConfig.__struct_fields__)
        raise ValueError(f"it cannot be read: {error}; known keys: {known}") from None
    name = peer.method or ("draft" if peer.model else "auto")
    method = next((method for method, row in PROPOSERS.items() if name in row.peers), name)
    if method not in methods():
        raise ValueError(f"method={name!r} is not supported, only {', '.join(methods())}")
    rates, length = peer.synthetic_acceptance_rates, peer.synthetic_acceptance_length
    if length is not None:
        if rates is not None:
            raise ValueError("synthetic_acceptance_rates and synthetic_acceptance_length exclude each other")
        rates = _rates_of_length(length, peer.num_speculative_tokens)
    if (peer.rejection_sample_method == "synthetic") != (rates is not None):
        raise ValueError("rejection_sample_method 'synthetic' and acceptance rates need each other; give both")
    least, most = peer.prompt_lookup_min, peer.prompt_lookup_max
    if least is None:
        least = min(DEFAULT_MIN_MATCH, DEFAULT_MAX_MATCH if most is None else most)
    return SpecConfig(
        method=method,
        folder=peer.model if needs_folder(method) else None,
        k=peer.num_speculative_tokens,
        min_match=least,
        max_match=max(DEFAULT_MAX_MATCH, least) if most is None else most,
        draft_sampling=PEER_SAMPLING[peer.draft_sample_method],
        verification=PEER_VERIFICATION[peer.rejection_sample_method],
        acceptance_rates=rates,
    )


def _rates_of_length(length: float, k: int | None) -> list[float]:
    """The schedule of least variance with this mean length, bonus included: ones, one fraction, zeros."""
    if k is None or not 1 <= length <= k + 1:
        raise ValueError(f"synthetic_acceptance_length={length} must be between 1 and num_speculative_tokens + 1")
    return [min(max(length - 1 - i, 0.0), 1.0) for i in range(k)]
