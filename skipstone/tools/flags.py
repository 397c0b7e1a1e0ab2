"""What several of these commands take on the command line: engine options, prompts, and values that flags may have."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from skipstone.cli.prompts import Prompt, read_file
from skipstone.errors import ConfigError
from skipstone.models.locate import shipped_prompts

ENGINE_OPTIONS = (
    "model", "dtype", "index_keys", "device", "exact", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "block_size", "num_blocks", "cache_memory_gb", "prefix_caching", "draft_sampling", "num_threads",
)  # fmt: skip


def integers(flag: str, low: int, high: int) -> Callable[[str], list[int]]:
    """For argparse: whole numbers separated by commas, ascending, each once. Raises ConfigError."""

    def read(text: str) -> list[int]:
        try:
            values = sorted({int(part) for part in text.split(",")})
        except ValueError:
            raise ConfigError(f"{flag} {text} must list whole numbers, as in 1,3,7") from None
        if values[0] < low or values[-1] > high:
            raise ConfigError(f"{flag} {text}: numbers must be between {low} and {high}")
        return values

    return read


def reals(flag: str, example: str) -> Callable[[str], list[float]]:
    """For argparse: numbers separated by commas. Raises ConfigError."""

    def read(text: str) -> list[float]:
        try:
            return [float(part) for part in text.split(",")]
        except ValueError:
            raise ConfigError(f"{flag} {text} must list numbers, as in {example}") from None

    return read


def natural(text: str, least: int = 0) -> int:
    """For argparse: a whole number of at least 0."""
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} must be at least {least}")
    return value


def positive(text: str) -> int:
    """For argparse: a whole number of at least 1."""
    return natural(text, 1)


def add_prompt_arguments(group: argparse._ArgumentGroup, count: int, tokens: int) -> None:
    """The flags that choose prompts, for commands that run a model over some."""
    add = group.add_argument
    add("--prompts", metavar="FILE", help=".txt or .jsonl as for generate [the shipped prompts]")
    add("--num-prompts", type=positive, default=count, metavar="N", help=f"that many, spread over the file [{count}]")
    add("--max-tokens", type=positive, default=tokens, metavar="N", help=f"longest answer, in tokens [{tokens}]")
    names = "as mtp,ngram,eagle3:FOLDER [mtp if the files hold it, heads beside the model, ngram]"
    add("--proposers", metavar="NAMES", help=names)


def choose_prompts(file: str | None, count: int | None) -> list[Prompt]:
    """`count` prompts spread over a file's, or over the shipped ones; all when there are no more than that."""
    prompts = read_file(file or str(shipped_prompts()), flag="--prompts")
    if count is None or len(prompts) <= count:
        return prompts
    return [prompts[i * len(prompts) // count] for i in range(count)]
