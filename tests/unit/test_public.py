"""The public interface: what `import elastic_mnist` offers, and what it costs."""

import subprocess
import sys

import pytest

import elastic_mnist


def test_importing_the_package_imports_nothing_of_it() -> None:
    """Every torchrun agent of the environment pays for the package: its modules and dependencies wait for first use."""
    code = """
import sys, typing
before = {*sys.modules}
import elastic_mnist
assert elastic_mnist.__version__
print(*sorted({*sys.modules} - before))
"""
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path[:0] = {sys.path}\n{code}"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["elastic_mnist"]


@pytest.mark.parametrize("name", elastic_mnist.__all__)
def test_each_public_name_is_there(name: str) -> None:
    """Each name of `__all__` can be imported from the package, also with a star."""
    stars: dict[str, object] = {}
    exec("from elastic_mnist import *", stars)  # noqa: S102 - the statement is what is tested
    assert stars[name] is getattr(elastic_mnist, name)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A name that does not exist is refused in Python's own words."""
    with pytest.raises(AttributeError, match="module 'elastic_mnist' has no attribute 'nothing'"):
        _ = elastic_mnist.nothing  # type: ignore[attr-defined]
    assert not hasattr(elastic_mnist, "nothing")
