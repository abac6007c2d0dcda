"""Makes the helpers beside these tests, and the gate's own (tests/gate), importable."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "gate"):
    sys.path.insert(0, str(folder))


@pytest.fixture(scope="session")
def day(tmp_path_factory):
    """The compiled world of day.c."""
    from virtual_day import build

    return build(tmp_path_factory.mktemp("virtual"))
