"""What a step costs does not grow with the number of those that wait."""

import subprocess
from pathlib import Path

import pytest

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
