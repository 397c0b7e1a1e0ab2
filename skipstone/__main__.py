"""`python -m skipstone` and the console script `skipstone`: dispatch only."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and end the process with its exit code."""
    try:
        from skipstone.cli.main import run

        code = run(sys.argv[1:])
    except KeyboardInterrupt:  # also while modules are still being imported
        print("interrupted", file=sys.stderr)
        code = 130
    sys.exit(code)


if __name__ == "__main__":
    main()
