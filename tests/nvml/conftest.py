"""A node with three GPUs, and programs in its instances that say what they are told."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node import BIN, Node, running_node

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not: for nvml_tools

from nvml_tools import Program  # noqa: E402


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with running_node(tmp_path, "3x24GiB") as one:
        yield one


Start = Callable[..., Program]


@pytest.fixture
def program(node: Node) -> Iterator[Start]:
    """program(id, *options of cgpuctl run, within=()): views.py in an instance; program(beside=one): in that one's."""
    started: list[Program] = []

    def start(id_: str = "", *options: str, within: tuple[str, ...] = (), beside: Program | None = None) -> Program:
        run = [str(BIN / "cgpuctl"), "run", "--id", id_, *options, "--", *within]
        one = beside.beside() if beside else Program(run, node.env)
        started.append(one)
        return one

    yield start
    for one in started:
        one.end()
