"""`skipstone inspect`: sizes, layers, caches and what does not match, from a checkpoint's headers."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from skipstone.cli.options import Command, Settings
from skipstone.config import EngineConfig
from skipstone.errors import CheckpointError, ConfigError, SkipstoneError
from skipstone.models.locate import locate
from skipstone.tools.report import STDOUT, publish

if TYPE_CHECKING:
    from skipstone.tools.inspect.checkpoint import CheckpointReport
    from skipstone.tools.inspect.heads import HeadReport

CHECK_FAILED = 3
LISTED = 12  # names of one kind that are printed; --json lists them all


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print the report; exit code 3 when the checkpoint would not load, an error's too. Errors as in `examine`."""
    config = settings.engine_config()
    folder = locate(config.model)
    from skipstone.models.loader import read_json, read_model_info
    from skipstone.runtime.proposers import head_method
    from skipstone.tools.inspect.checkpoint import examine  # imports torch, which errors above should not wait for
    from skipstone.tools.inspect.heads import examine_head

    try:
        method = head_method(read_json(folder / "config.json", "a model folder needs the config.json of its release"))
        is_head = method not in (None, "draft")
        if not is_head:
            read_model_info(folder)
    except SkipstoneError as error:
        error.exit_code = CHECK_FAILED
        raise
    if args.target and not is_head:
        raise ConfigError(f"--target {args.target} is for the folder of a draft head, and {folder} is a model's")
    report: CheckpointReport | HeadReport
    try:
        if is_head:
            target = locate(args.target) if args.target else _target_of(folder, str(method))
            report = examine_head(str(method), folder, target, config.dtype, config.device)
        else:
            report = examine(folder, config.dtype, config.index_keys, config.device)
    except CheckpointError as error:
        error.exit_code = CHECK_FAILED
        raise
    publish(report, STDOUT if args.json else None, lambda report: print("\n".join(render(report))))
    return 0 if report.loads else CHECK_FAILED


def _target_of(folder: Path, method: str) -> Path:
    """The model beside a head's folder that would find it by its name."""
    path = folder.resolve()
    target = path.with_name(path.name.removesuffix(f"-{method}"))
    if target == path or not (target / "config.json").is_file():
        raise ConfigError(
            f"{folder} holds a draft head for --spec {method}, which is checked against its model; name that: --target "
            "FOLDER"
        )
    return target


def render(report: CheckpointReport | HeadReport) -> list[str]:
    """The report as lines of text."""
    from skipstone.tools.inspect.heads import HeadReport

    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in report.stored_dtypes.items())
    files = _row("files", f"{report.files} with {_size(report.bytes_on_disk)}; tensors: {dtypes}")
    return _render_head(report, files) if isinstance(report, HeadReport) else _render_checkpoint(report, files)


def _render_head(report: HeadReport, files: str) -> list[str]:
    verdict = f"this head loads with {report.target}" if report.loads else f"this head does not load: {report.problem}"
    return [
        f"draft head for --spec {report.method}:{report.folder}:K",
        files,
        *([_row("drafting", report.drafting)] if report.drafting else []),
        "",
        verdict,
    ]


def _render_checkpoint(report: CheckpointReport, files: str) -> list[str]:
    kinds = {name: count for name, count in report.layers.items() if count and name != "layers"}
    chat = report.chat_template or "absent: chat is not available"
    lines = [
        f"{report.architecture} in {report.folder}",
        files,
        _row("layers", f"{report.layers['layers']}: " + ", ".join(f"{count} {name}" for name, count in kinds.items())),
        _row("context", f"{report.max_position_embeddings:,} positions; vocabulary {report.vocab_size:,}"),
        *([_row("sparse budget", report.sparse_budget)] if report.sparse_budget else []),
        _row("tokenizer", "tokenizer.json" if report.tokenizer else "absent: only prompt_token_ids can be used"),
        _row("chat template", chat if report.tokenizer else "chat is not available without a tokenizer"),
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
    if report.mtp_loaded_bytes:
        weights += f", MTP modules {_size(report.mtp_loaded_bytes)} more"
    if report.does_not_fit:
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
    from skipstone.tools.inspect.checkpoint import FAULTS

    lines = [f"note: {text}" for text in report.declared_but_absent]
    lines += [f"note: {name} is not in the index and not read" for name in report.unread]
    # Names tell nothing of a checkpoint in another format.
    for field, kind in ({} if report.format_refused else FAULTS).items():
        if names := getattr(report, field):
            lines += [f"{len(names)} tensors {kind}:", *(f"  {name}" for name in names[:LISTED])]
            lines += [f"  and {len(names) - LISTED} more; --json lists all"] if len(names) > LISTED else []
    if report.unusable:
        lines += [f"{len(report.unusable)} files that cannot be used:", *(f"  {text}" for text in report.unusable)]
    lines += [text for text in (report.format_refused, report.does_not_fit) if text]
    if report.loads:
        return [*lines, "every weight is there: this checkpoint loads"]
    return [*lines, f"this checkpoint does not load{' here' if report.complete else ''}"]


def _row(name: str, value: str) -> str:
    return f"{name:<15}{value}"


def _size(num_bytes: int) -> str:
    if num_bytes < 1000:
        return f"{num_bytes} B"
    power = min(int(math.log10(num_bytes)) // 3, 4)
    return f"{num_bytes / 1000**power:.{2 if power == 4 else 1}f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", metavar="FOLDER", help="of a draft head's folder: the model it is checked against")
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON object, all names in full")


COMMAND = Command(
    summary="look into a checkpoint: sizes, layers, caches, what fits, what is missing",
    usage="MODEL [--target FOLDER] [--json]",
    options={EngineConfig: ("model", "dtype", "index_keys", "device")},
    run=run,
    add_arguments=_add_arguments,
)
