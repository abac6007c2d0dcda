"""A running node for each test module, and the programs that share it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from node import ROOT, Node, build_c, running_node


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """demo/busy.c: kernels of so many microseconds for so many seconds beside an allocation of so many MiB."""
    return build_c(ROOT / "demo/busy.c", tmp_path_factory.mktemp("bin") / "busy")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A cgpud of its own with one simulated GPU of 24 GiB."""
    with running_node(tmp_path) as one:
        yield one
