"""A node with one instance, the program that is soaked, and the instance's pages as the daemon holds them."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from node import ROOT, Node, build_c, running_node

from cgpusched.driver.find import packaged

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(scope="session")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sim = packaged("sim/libcuda.so.1").parent
    return build_c(ROOT / "tests/soak/soak.c", tmp_path_factory.mktemp("soak") / "soak", "-Wall", "-Wextra", "-Werror",
                   f"-L{sim}", "-l:libcuda.so.1")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with running_node(tmp_path) as one:
        yield one
