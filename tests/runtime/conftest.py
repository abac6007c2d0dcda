from collections.abc import Iterator
from pathlib import Path

import pytest
from oci import Bench, StandIn


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


@pytest.fixture
def daemon(bench: Bench) -> Iterator[StandIn]:
    one = StandIn(bench.socket)
    yield one
    one.close()
