"""`elastic-mnist verify SNAPSHOT [OTHER]`: is it whole, and are two equal, bit for bit?"""

from elastic_mnist.errors import SnapshotError
from elastic_mnist.snapshots.comparison import compare
from elastic_mnist.snapshots.lookup import find
from elastic_mnist.training.model import weights_sha256


def run(snapshot: str, other: str | None) -> int:
    """Print what is found; return 0 for whole and equal, 1 for damaged or different."""
    states, status = [], 0
    for location in (snapshot, other):
        if location is None:
            continue
        try:
            found = find(location, named="snapshot")
        except SnapshotError as error:
            print(f"damaged   {error}")  # noqa: T201 - printing is what a tool does
            return 1
        state = found.state
        states.append(state)
        print(f"whole     {found.path}")  # noqa: T201
        if found.num_damaged_newer:
            print(f"damaged   {found.num_damaged_newer} newer ones there")  # noqa: T201
            status = 1
        print(f"          step {state['step']}, epoch {state['epoch']}, run {state['run_id']}")  # noqa: T201
        print(f"          weights_sha256 {weights_sha256(state['model'])}")  # noqa: T201
    if other is None:
        return status
    difference = compare(*states)
    if difference is None:
        print("equal     weights, optimizer and position, bit for bit")  # noqa: T201
        return status
    values = f"{difference.ours} and {difference.theirs}"
    print(f"different {difference.num_keys} keys; first {difference.location}: {values}")  # noqa: T201
    if difference.largest is not None:
        print(f"          largest difference {difference.largest:.6g}")  # noqa: T201
    return 1
