"""The console command: `elastic-mnist TOOL ...`.

Exit status: 0 for good; 1 where the tool found what it looks for (invalid, damaged, different); 2 for a usage
error; 3 where what there is does not suffice for a verdict.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from elastic_mnist import __version__
from elastic_mnist.errors import EXIT_USAGE, UsageError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a tool; return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        if options.tool == "audit":
            from elastic_mnist.tools import audit  # noqa: PLC0415 - each tool pays for its own imports

            return audit.run(options.directory, event_log=options.event_log, run_id=options.run_id)
        from elastic_mnist.tools import verify  # noqa: PLC0415 - the same

        return verify.run(options.snapshot, options.other)
    except UsageError as error:
        sys.stderr.write(f"elastic-mnist: error: {error}\n")
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elastic-mnist", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--version", action="version", version=__version__)
    tools = parser.add_subparsers(dest="tool", required=True, metavar="TOOL")

    audit = tools.add_parser("audit", help="check that each sample of each epoch was used exactly once")
    audit.add_argument("directory", type=Path, metavar="DIR", help="what --sample_log named")
    audit.add_argument(
        "--event_log", type=Path, help="the job's event log (default: one near DIR that tells of the run)"
    )
    audit.add_argument("--run_id", help="the run (default: the one that wrote last)")

    verify = tools.add_parser("verify", help="check a snapshot, or compare two bit by bit")
    verify.add_argument("snapshot", metavar="SNAPSHOT", help="a .pt file, or a directory or URL for its newest")
    verify.add_argument("other", metavar="OTHER", nargs="?", help="a second one to compare with")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
