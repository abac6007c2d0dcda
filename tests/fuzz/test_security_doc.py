"""SECURITY.md: what it says is tested is, and its figures are the code's."""

import re
from pathlib import Path

from cgpufs import session
from cgpusched.config import ControlConfig
from cgpusched.daemon.containers import readers
from cgpusched.daemon.logs import Damper
from cgpusched.daemon.server import clients, control, wire
from cgpusched.gate import Tuning

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "SECURITY.md").read_text()


def test_every_test_it_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+)(\.py)?(?:::(\w+))?`", TEXT)
    assert len(named) > 20
    for path, ending, name in named:
        assert (ROOT / (path + ending)).exists(), path + ending
        assert not name or f"def {name}(" in (ROOT / (path + ending)).read_text(), name


def test_its_limits_are_the_codes() -> None:
    tuning = Tuning()
    cells = [[cell.strip() for cell in line.split("|")] for line in TEXT.splitlines() if line.count("|") == 5]
    rows = {row[1]: row[2] for row in cells}
    assert rows["processes of an instance on a GPU"] == str(wire.SLOTS)
    assert rows["connections of an instance"] == (
        f"{clients.CONNECTIONS}; {clients.BURST} at once, then {clients.RATE:.0f} a second; "
        f"{clients.HELLO_SECONDS:.0f} s to say hello")
    assert rows["bells of a region"] == f"{tuning.bells_per_s:,} a second"
    assert rows["claimed work in flight"] == f"believed up to {tuning.overdue_cap_ns // 10**9} s, once"
    assert Damper().seconds == 60 and rows["log lines about an instance's connections"] == f"{Damper().burst} a minute"
    assert rows["connections to `control.sock`"] == (
        f"{control.CONNECTIONS_OF_A_USER} a user, {control.CONNECTIONS_OF_OTHERS} of all users but root")
    assert rows["a request"] == f"{control.LINE_LIMIT >> 10} KiB, {control.IDLE_SECONDS:.0f} s"
    assert rows["requests of all views in a row"].startswith(f"{session.BATCH}, {session.BATCH_SECONDS * 1e3:g} ms;")
    assert rows["threads that read containers' files"] == (
        f"1 a container that hangs, {readers.READERS} of all; {readers.READ_SECONDS:.0f} s")
    for key in re.findall(r"`(?:\[control\] )?(max_\w+)`", rows["instances of a user"]):
        assert hasattr(ControlConfig(), key)
