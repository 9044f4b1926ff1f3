"""The console command: `elastic-mnist TOOL ...`, everything that is not training.

Exit status: 0 for good; 1 where the tool found what it looks for (invalid, damaged, different); 2 for a usage
error; 3 where what there is does not suffice for a verdict.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from elastic_mnist import __version__
from elastic_mnist.chaos.plan import KINDS
from elastic_mnist.errors import EXIT_USAGE, UsageError

_SNAPSHOT = "a snapshot file, or a directory or URL for its newest valid one"

_EXAMPLES = """examples:
  elastic-mnist inspect snapshots                    which snapshots are there, and are they whole
  elastic-mnist verify killed calm                   the same weights, bit for bit?
  elastic-mnist audit ledger                         each sample used exactly once?
  elastic-mnist chaos --seed 7 --faults 10           does it survive that, and end the same?
  elastic-mnist export s3://bucket/run weights.pt    the weights alone, for another script
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a tool; return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args([_with_underscores(argument) for argument in arguments])
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        status = run(options)
        sys.stdout.flush()
    except UsageError as error:
        sys.stderr.write(f"elastic-mnist: error: {error}\n")
        return EXIT_USAGE
    except BrokenPipeError:  # whoever read it, `head` for instance, has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at the exit fails once more
        return 128 + signal.SIGPIPE
    return status


# Each tool pays for its own imports.


def _audit(options: argparse.Namespace) -> int:
    from elastic_mnist.cli import audit  # noqa: PLC0415 - see above

    return audit.run(options.directory, event_log=options.event_log, run_id=options.run_id)


def _verify(options: argparse.Namespace) -> int:
    from elastic_mnist.cli import verify  # noqa: PLC0415 - the same

    return verify.run(options.snapshot, options.other)


def _inspect(options: argparse.Namespace) -> int:
    from elastic_mnist.cli import inspect  # noqa: PLC0415 - the same

    return inspect.run(options.location, verify=not options.no_verify, as_json=options.json)


def _export(options: argparse.Namespace) -> int:
    from elastic_mnist.cli import export  # noqa: PLC0415 - the same

    return export.run(options.snapshot, options.file, force=options.force)


def _chaos(options: argparse.Namespace) -> int:
    from elastic_mnist.chaos import run as chaos  # noqa: PLC0415 - the same

    request = chaos.Request(
        seed=chaos.a_seed() if options.seed is None else options.seed,
        num_faults=options.faults,
        kinds=tuple(options.kinds.split(",")),
        num_processes=options.nproc,
        max_nodes=options.nodes,
        patience=options.patience,
        directory=options.directory,
        json_path=options.json,
        training=tuple(options.training),
    )
    return chaos.run(request)


def _with_underscores(argument: str) -> str:
    """Spell an option as it is declared: hyphens or underscores in its name, as with the trainer's."""
    name, equals, value = argument.partition("=")
    return "--" + name[2:].replace("-", "_") + equals + value if argument.startswith("--") else argument


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="elastic-mnist",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    tools = parser.add_subparsers(
        dest="tool", required=True, metavar="TOOL", title="tools", description="`elastic-mnist TOOL --help` tells more"
    )

    def add(name: str, run: Callable[[argparse.Namespace], int], text: str, more: str) -> argparse.ArgumentParser:
        tool = tools.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}. {more}")
        tool.set_defaults(run=run)
        return tool

    inspect = add(
        "inspect",
        _inspect,
        "list the snapshots at a place, or look at one file",
        "Every snapshot is read and held against its checksum; nothing is changed. Ends with 0 where all are whole, "
        "1 where something is damaged, 2 where it cannot be accessed, 3 where there is no snapshot.",
    )
    inspect.add_argument(
        "location", metavar="PATH_OR_URL", help="a directory, a URL or a file, ours or another program's"
    )
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.add_argument("--no_verify", action="store_true", help="read the manifests only, of a large remote store")

    verify = add(
        "verify",
        _verify,
        "check a snapshot, or compare two bit by bit",
        "Compared are weights, optimizer and position. Ends with 0 for whole and equal, 1 for damaged or different.",
    )
    verify.add_argument("snapshot", metavar="SNAPSHOT", help=_SNAPSHOT)
    verify.add_argument("other", metavar="OTHER", nargs="?", help="a second one to compare with")

    export = add(
        "export",
        _export,
        "write a snapshot's weights as a plain state_dict",
        "Any script that has the network loads FILE with torch.load(FILE, weights_only=True). Ends with 1 where the "
        "snapshot is damaged or of another network.",
    )
    export.add_argument("snapshot", metavar="SNAPSHOT", help=f"{_SNAPSHOT}; another program's file serves as well")
    export.add_argument("file", metavar="FILE", help="where to write; a path or a URL")
    export.add_argument("--force", action="store_true", help="replace FILE if it is there already")

    audit = add(
        "audit",
        _audit,
        "check that each sample of each epoch was used exactly once",
        "Read are the ledgers of --sample_log and the event log. Ends with 0 for valid, 1 for invalid, 3 for unknown.",
    )
    audit.add_argument("directory", type=Path, metavar="DIR", help="what --sample_log named")
    audit.add_argument(
        "--event_log", type=Path, help="the job's event log (default: one near DIR that tells of the run)"
    )
    audit.add_argument("--run_id", help="the run (default: the one that wrote last)")

    chaos = add(
        "chaos",
        _chaos,
        "run a job undisturbed, then under seeded faults, and compare",
        "Workers and agents are killed, stopped, interrupted and joined at coordinates that the seed chooses; then the "
        "job must finish. Logs and files are judged. Ends with 0 for valid, 1 for invalid, 3 for unknown, as where a "
        "fault did not fire.",
    )
    chaos.add_argument("--seed", type=int, help="of the plan (default: a random one, which is printed)")
    chaos.add_argument("--faults", type=int, default=5, metavar="N", help="number of faults (default: 5)")
    chaos.add_argument(
        "--kinds",
        default=",".join(KINDS),
        metavar="KIND,...",
        help=f"kinds of faults, separated by commas, from {', '.join(KINDS)} (default: all)",
    )
    chaos.add_argument("--nproc", type=int, default=2, metavar="N", help="workers of a node (default: 2)")
    chaos.add_argument("--nodes", type=int, default=2, metavar="N", help="nodes at most; it starts with 1 (default: 2)")
    chaos.add_argument(
        "--patience", type=float, default=1.0, metavar="FACTOR", help="of all bounds of time, for a slow machine"
    )
    chaos.add_argument(
        "--directory", type=Path, metavar="DIR", help="where the jobs run (default: a temporary one, removed if valid)"
    )
    chaos.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts for machines")
    chaos.add_argument(
        "training", nargs="*", metavar="-- OPTION", help="options of the training (default: 126 steps on real MNIST)"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
