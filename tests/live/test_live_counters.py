"""Counters over a change of daemon: what somebody has seen is never less afterwards, and what goes on is counted on."""

import collections
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node import wait_until


def counters(node: Any, id: str = "one") -> dict[str, int]:
    """All of one instance, flat; 0 each where there is none."""
    (gpu,) = node.status()["gpus"]
    found = next((one for one in gpu["instances"] if one["id"] == id), None)
    if found is None:
        return collections.defaultdict(int)
    audit = {name: found["audit"][name] for name in ("bypasses", "overs")}
    own = {name: found[name] for name in ("busy_ns", "turns", "overdue")}
    return {**own, **found["counters"], **audit, "fallbacks": gpu["fallbacks"], "starved": gpu["starved"]}


def never_less(before: dict[str, int], after: dict[str, int]) -> None:
    assert {name: after[name] for name in before if after[name] < before[name]} == {}


def rises(before: dict[str, int], after: dict[str, int]) -> bool:
    return all(after[name] > before[name] for name in ("busy_ns", "turns", "launches"))


def stop_and_start(node: Any) -> None:
    node.kill_daemon(signal.SIGTERM)
    assert node.daemon.wait(20) == 0
    node.start()


@pytest.mark.parametrize("change", [lambda node: node.restart(), lambda node: node.upgrade(), stop_and_start],
                         ids=["killed", "upgraded", "stopped"])
def test_they_go_on(node: Any, busy: Path, change: Callable[[Any], None]) -> None:
    for id in ("one", "two"):
        node.run(id, busy, 300, 60, 64)
    node.write("create idle memsize=1GiB", "inst_ctl")
    wait_until(lambda: counters(node)["turns"] > 50, "both to have had turns")
    for _ in range(2):
        before = counters(node)
        assert before["launches"] > 0
        change(node)
        never_less(before, counters(node))
        wait_until(lambda: rises(before, counters(node)), "all of them to rise again")  # noqa: B023
    assert set(counters(node, "idle").values()) == {0} | {counters(node)["fallbacks"]}


def test_what_happened_without_a_daemon_is_counted(node: Any, busy: Path) -> None:
    """Of two, the one that had no turn just then opens its gate by itself."""
    ids = ("one", "two")

    def ungated() -> int:
        return sum(counters(node, id)["ungated"] for id in ids)

    for id in ids:
        node.run(id, busy, 300, 60, 64, out=node.base / f"{id}.out")
    wait_until(lambda: all(counters(node, id)["launches"] for id in ids), "both to run")
    before = {id: counters(node, id) for id in ids}
    assert ungated() == 0
    node.kill_daemon()
    for id in ids:
        out = node.base / f"{id}.out"
        lines = out.read_text().count("\n")
        wait_until(lambda: out.read_text().count("\n") >= lines + 3, "it to run on")  # noqa: B023
    node.start()
    wait_until(lambda: ungated() > 0, "the news of it")
    for id in ids:
        never_less(before[id], counters(node, id))
    node.restart()
    assert ungated() > 0


def test_a_new_instance_of_the_name_begins_at_0(node: Any, busy: Path) -> None:
    program = node.run("one", busy, 300, 60, 64)
    wait_until(lambda: counters(node)["launches"] > 0, "it to run")
    program.kill()
    wait_until(lambda: "one" not in node.read("inst_ctl"), "the instance to go")
    node.write("create one memsize=1GiB", "inst_ctl")
    node.restart()
    assert counters(node)["busy_ns"] == counters(node)["launches"] == 0


@pytest.mark.parametrize("damage", ["", "{", "[]", json.dumps({"version": 2, "boot": ""}),
                                    json.dumps({"version": 1, "boot": "another", "instances": "x"})])
def test_a_damaged_file_costs_the_counts(node: Any, damage: str) -> None:
    node.write("create one memsize=1GiB", "inst_ctl")
    node.kill_daemon()
    (node.runtime / "counters.json").write_text(damage)
    node.start()
    assert set(counters(node).values()) == {0}
    assert ("counters begin at 0" in node.log.read_text()) == ("another" not in damage)
