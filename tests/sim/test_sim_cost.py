"""What simulating costs: it must not drown what is measured on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def test_an_uncontended_launch_costs_well_under_a_microsecond(machine: Any, program: Callable[[str], str]) -> None:
    launch, null = map(float, machine.run_binary(program("cost.c")).split())
    assert launch < 1000
    assert null < 100
