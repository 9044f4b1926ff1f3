"""The tree in the README is the tree there is, and data flows down it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "elastic_mnist"
UNLISTED = {"__init__"}  # a package's front door says nothing of its own


def rooms() -> list[str]:
    """Return the modules of the README's tree in its order, as dotted names; of a folder with a slash, the folder."""
    tree = re.search(r"^    elastic_mnist/\n((?:      .*\n)+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert tree is not None
    found, folder = [], ""
    for line in tree[1].splitlines():
        indent, name = len(line) - len(line.lstrip()), line.split()[0]
        if indent == 6:
            folder = ""
        if name == "snapshots/":
            folder = "snapshots."
        else:
            found.append(folder + name.removesuffix(".py").rstrip("/"))
    return found


def room_of(module: str, listed: list[str]) -> str | None:
    """Return the listed room that a module, named without the package, belongs to."""
    return next((room for room in listed if module == room or module.startswith(room + ".")), None)


def imports_of(path: Path) -> set[str]:
    """Return the modules of this package that a file imports anywhere, named without the package."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("elastic_mnist.") for name in found if name.startswith("elastic_mnist.")}


def test_every_module_has_its_line_in_the_readme() -> None:
    """Each file of the package stands in the tree or in a folder of it, and each line of the tree is there."""
    listed = rooms()
    files = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    assert {file for file in files if room_of(file, listed) is None and file.split(".")[-1] not in UNLISTED} == set()
    assert {room for room in listed if not any(file == room or file.startswith(room + ".") for file in files)} == set()


def test_a_module_imports_only_what_stands_above_it() -> None:
    """No import points down the README's tree, nor to a neighbour in a circle."""
    listed = rooms()
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        here = room_of(module, listed)
        if here is None:
            continue
        for name in imports_of(path):
            there = room_of(name, listed)
            if there not in (None, here) and listed.index(there) > listed.index(here):
                wrong.append(f"{module} imports {name}")
    assert wrong == []
