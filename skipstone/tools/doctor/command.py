"""`skipstone doctor`: what this machine can run, with which kernels, and whether they compute what they should."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from skipstone.cli.options import Command, Settings
from skipstone.errors import ConfigError
from skipstone.tools.report import STDOUT, publish

if TYPE_CHECKING:
    from skipstone.tools.doctor.report import Report

FAILED = 1


def run(args: argparse.Namespace, settings: Settings) -> int:
    """Print the report; exit code 1 when an op is broken here."""
    try:
        from skipstone.tools.doctor.report import report  # imports torch, which may be what is broken
    except (ImportError, OSError) as error:
        raise ConfigError(f"torch cannot be imported: {' '.join(str(error).split())}") from None
    found = report()
    publish(found, STDOUT if args.json else None, render)
    return 0 if found.passed else FAILED


def render(found: Report) -> None:
    """Print the report."""
    lines = [f"{name:<15}{value}" for name, value in found.facts.items()]
    lines += ["", f"{'op':<20}{'runs with':<12}{'error':>9}  {'row alone':<12}result"]
    for item in found.ops:
        error = "" if item.error is None else f"{item.error:.1e}"
        alone = {True: "same bits", False: "other bits", None: ""}[item.same_alone]
        result = "PASS" if item.failure is None else f"FAIL: {item.failure}"
        lines.append(f"{item.op:<20}{item.implementation:<12}{error:>9}  {alone:<12}{result}")
    broken = sum(item.failure is not None for item in found.ops)
    lines += ["", *(f"note: {text}" for text in found.notes)]
    verdict = f"{broken} of {len(found.ops)} ops are broken here" if broken else "every op computes what it should"
    print("\n".join([*lines, f"{verdict} ({found.seconds:.1f} s)"]))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument_group("output").add_argument("--json", action="store_true", help="one JSON object")


COMMAND = Command(
    summary="what this machine can run and why not, and a self-test of every op",
    usage="[--json]",
    options={},
    run=run,
    add_arguments=_add_arguments,
)
