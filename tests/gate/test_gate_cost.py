"""What a turn costs: a step does not grow with the number of those that wait, and nobody is woken up for nothing."""

import subprocess
from pathlib import Path

import pytest
from gate_virtual import MS, SLICE, US, Core, make_plan

from cgpusched._gate import lib

ROOT = Path(__file__).resolve().parents[2]
CORE = ("core", "events", "rotation", "cap", "times", "watch")


@pytest.fixture(scope="module")
def cost(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bin") / "cost"
    subprocess.run(["gcc", "-O2", "-Wall", "-Wextra", f"-I{ROOT}/csrc/gate", f"-I{ROOT}/csrc/abi", "-o", out,
                    Path(__file__).with_name("cost.c"), *(f"{ROOT}/csrc/gate/{name}.c" for name in CORE)], check=True)
    return out


def test_a_turn_costs_the_same_among_64_as_among_2(cost: Path) -> None:
    def ns(entities: int) -> float:
        """The least of five: thread CPU time, so that others on the machine hardly matter."""
        return min(float(subprocess.run([cost, str(entities), "50000"], capture_output=True, text=True, check=True,
                                        timeout=30).stdout) for _ in range(5))

    few, many = ns(2), ns(64)
    assert many < 1.5 * few
    assert many < 5000


@pytest.mark.parametrize("opened,high,end,later", [
    (True, False, SLICE, 1 * MS),
    (False, False, SLICE, 0),  # nobody there who would obey
    (True, True, 90 * MS + 500 * US, 0),  # its window may not be passed
])
def test_who_obeys_its_deadline_costs_no_wake_up_for_it(opened: bool, high: bool, end: int, later: int) -> None:
    core = Core()
    core.step(0, [(lib.CORE_JOIN, 0, None), (lib.CORE_JOIN, 1, None),
                  (lib.CORE_PLAN, 0, make_plan([(0, SLICE, high), (1, SLICE, False)]))])
    core.step(0, [(lib.CORE_REPORT, 0, {"demand": 1})])
    (kind, entity, epoch, _), = core.acted()
    assert (kind, entity) == (lib.CORE_GRANT, 0)
    report = {"epoch": epoch, "demand": 1, "opened": opened, "holds": opened, "undrained": opened}
    wake = core.step(0, [(lib.CORE_REPORT, 0, report), (lib.CORE_REPORT, 1, {"demand": 1})])
    assert core.acted() == [(lib.CORE_DEADLINE, 0, epoch, end)]
    assert wake == end + later
    core.step(wake, [(lib.CORE_REPORT, 0, report)])
    assert core.acted()[0][:3] == (lib.CORE_CLOSE, 0, epoch)
