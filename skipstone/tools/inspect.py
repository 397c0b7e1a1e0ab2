"""`skipstone inspect`: sizes, layers, caches and what does not match, from a checkpoint's headers."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import msgspec

from skipstone.config import EngineConfig
from skipstone.errors import CheckpointError, SkipstoneError
from skipstone.models.locate import locate
from skipstone.serve.cli_options import Command, Settings

if TYPE_CHECKING:
    from skipstone.tools.checkpoint import CheckpointReport

CHECK_FAILED = 3
LISTED = 12  # names of one kind that are printed; --json lists them all


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print the report; exit code 3 when the checkpoint would not load, an error's too. Errors as in `examine`."""
    config = settings.engine_config()
    folder = locate(config.model)
    from skipstone.models.loader import read_model_info
    from skipstone.tools.checkpoint import examine  # imports torch, which errors above should not wait for

    try:
        read_model_info(folder)
    except SkipstoneError as error:
        error.exit_code = CHECK_FAILED
        raise
    try:
        report = examine(folder, config.dtype, config.index_keys, config.device)
    except CheckpointError as error:
        error.exit_code = CHECK_FAILED
        raise
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
    else:
        print("\n".join(render(report)))
    return 0 if report.loads else CHECK_FAILED


def render(report: CheckpointReport) -> list[str]:
    """The report as lines of text."""
    kinds = {name: count for name, count in report.layers.items() if count and name != "layers"}
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in report.stored_dtypes.items())
    lines = [
        f"{report.architecture} in {report.folder}",
        _row("files", f"{report.files} with {_size(report.bytes_on_disk)}; tensors: {dtypes}"),
        _row("layers", f"{report.layers['layers']}: " + ", ".join(f"{count} {name}" for name, count in kinds.items())),
        _row("context", f"{report.max_position_embeddings:,} positions; vocabulary {report.vocab_size:,}"),
        _row("tokenizer", "tokenizer.json" if report.tokenizer else "absent: only prompt_token_ids can be used"),
        _row("chat template", report.chat_template or "absent: chat is not available"),
        _row("licence", ", ".join(report.licences) or "no licence file in the folder"),
        "",
        f"{'part':<22}{'tensors':>9}{'parameters':>18}{'on disk':>12}",
    ]
    for part in report.parts:
        remark = "" if part.loaded else "  for --spec mtp" if part.part == "MTP module" else "  not loaded"
        lines.append(f"{part.part:<22}{part.tensors:>9}{part.parameters:>18,}{_size(part.num_bytes):>12}{remark}")
    total = sum(part.parameters for part in report.parts)
    lines.append(f"{'total':<22}{sum(part.tensors for part in report.parts):>9}{total:>18,}")
    lines += ["", f"{'cache group':<30}{'layers':>8}{'bytes per token in ' + report.run_dtype:>30}"]
    lines += [f"{group.group:<30}{group.layers:>8}{group.bytes_per_token:>30,}" for group in report.cache_groups]
    lines += [f"{'total':<30}{'':>8}{report.cache_bytes_per_token:>30,}", ""]
    if report.index_keys == "fp8":
        lines.append(_row("index keys", "cached in FP8 with a float32 scale each"))
    lines += [_row("memory", _fit(report)), "", *_speculation(report), "", *_problems(report)]
    return lines


def _fit(report: CheckpointReport) -> str:
    free = f"{_size(report.free_bytes)} free here"
    weights = f"weights take {_size(report.loaded_bytes)} as {report.run_dtype}"
    if report.loaded_bytes > report.free_bytes:
        return f"{weights}, which does not fit: {free}"
    full = report.tokens_that_fit // report.max_position_embeddings
    return f"{weights}; {free}; the rest holds {report.tokens_that_fit:,} tokens, or {full:,} full contexts"


def _speculation(report: CheckpointReport) -> list[str]:
    """Draft modules in the files, and which values of --spec would work."""
    modules = f"MTP modules: {report.mtp_modules_declared} declared, {report.mtp_modules_present} in the files"
    if report.mtp_cache_bytes_per_token:
        modules += f", whose caches take {report.mtp_cache_bytes_per_token:,} bytes per token more"
    lines = [_row("speculation", modules)]
    for proposer in report.proposers:
        verdict = "" if proposer.works else "not available: "
        lines.append(f"  {'--spec ' + proposer.spec + ':K':<24}{verdict}{proposer.reason}")
    return lines


def _problems(report: CheckpointReport) -> list[str]:
    lines = [f"note: {text}" for text in report.declared_but_absent]
    kinds = (("missing", report.missing), ("unexpected", report.unexpected), ("with another shape", report.other_shape))
    for kind, names in kinds:
        if names:
            lines.append(f"{len(names)} tensors {kind}:")
            lines += [f"  {name}" for name in names[:LISTED]]
            lines += [f"  and {len(names) - LISTED} more; --json lists all"] if len(names) > LISTED else []
    if report.unusable:
        lines += [f"{len(report.unusable)} files that cannot be used:", *(f"  {text}" for text in report.unusable)]
    verdict = "every weight is there: this checkpoint loads" if report.loads else "this checkpoint does not load"
    return [*lines, verdict]


def _row(name: str, value: str) -> str:
    return f"{name:<15}{value}"


def _size(num_bytes: int) -> str:
    value = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} TB"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON object, all names in full")


COMMAND = Command(
    summary="look into a checkpoint: sizes, layers, caches, what fits, what is missing",
    usage="MODEL [--json]",
    options={EngineConfig: ("model", "dtype", "index_keys", "device")},
    run=run,
    add_arguments=_add_arguments,
)
