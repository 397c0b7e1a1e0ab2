"""How many drafts pay at each number of running requests: the file that `tune` writes and `--k-table` reads."""

from __future__ import annotations

from pathlib import Path

import msgspec

from skipstone.config import EngineConfig, read_spec
from skipstone.errors import ConfigError
from skipstone.spec_config import LARGEST_K, SpecConfig, parse_spec

Ranges = list[tuple[int, int, int]]


class KTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A proposer and its k by batch size: [first, last, k], first and last number of requests.

    The ranges carry vLLM's key and meaning. Batches beyond the last range take its k.
    """

    spec: str
    num_speculative_tokens_per_batch_size: Ranges
    model: str = ""
    notes: str = ""

    def most_drafts(self, num_requests: int) -> int:
        """Drafts per request when so many are running."""
        ranges = self.num_speculative_tokens_per_batch_size
        return next((k for _, last, k in ranges if num_requests <= last), ranges[-1][2])


def read_k_table(path: str) -> KTable:
    """Read and check a table. Raises ConfigError naming the file, the range and what is allowed."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"k_table={path} cannot be read: {error.strerror}; skipstone tune writes one") from None
    try:
        table = msgspec.json.decode(content, type=KTable)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"k_table={path} is not a table of drafts: {error}; skipstone tune writes one") from None
    ranges, expected = table.num_speculative_tokens_per_batch_size, 1
    if not ranges:
        raise ConfigError(f"k_table={path} has no range; it needs at least one, as in [[1, 64, 3]]")
    for first, last, k in ranges:
        if first != expected or last < first:
            raise ConfigError(
                f"k_table={path}: the range {[first, last, k]} must start at {expected} and not end before it starts"
            )
        if not 0 <= k <= LARGEST_K:
            raise ConfigError(f"k_table={path}: k={k} in {[first, last, k]} must be between 0 and {LARGEST_K}")
        expected = last + 1
    spec = parse_spec(table.spec)
    if spec.method in ("auto", "off") or spec.k is not None:
        raise ConfigError(f"k_table={path}: spec={table.spec!r} must name a proposer without a number of drafts")
    return table


def asked_spec(config: EngineConfig) -> tuple[SpecConfig, KTable | None]:
    """What to draft with, and the table that says how far. Raises ConfigError for options that do not fit together."""
    spec = read_spec(config)
    if config.k_table is not None:
        table = read_k_table(config.k_table)
        return with_table(spec, table, config.spec), table
    if spec.k_from_table:
        raise ConfigError(f"spec={config.spec!r} takes k from a table; pass --k-table FILE, written by tune")
    return spec, None


def with_table(spec: SpecConfig, table: KTable, text: str) -> SpecConfig:
    """The proposer to use with a table, with the most drafts that any batch size wants.

    Raises ConfigError when `text`, the user's own spec, names another proposer.
    """
    ours = parse_spec(table.spec)
    if spec.method == "off":
        raise ConfigError(f"spec={text!r} and k_table exclude each other; leave one of them out")
    if spec.method == "auto":
        asked = {name: getattr(spec, name) for name in ("k", "draft_sampling", "verification", "acceptance_rates")}
        spec = msgspec.structs.replace(ours, **{name: value for name, value in asked.items() if value is not None})
    elif spec.method != ours.method:
        raise ConfigError(f"spec={text!r}, but k_table was made for {table.spec!r}; use that, or make another table")
    largest = max(k for _, _, k in table.num_speculative_tokens_per_batch_size)
    return spec if spec.k is not None else msgspec.structs.replace(spec, k=largest)
