"""cgpu-smi: the published table to the character, and what it says when there is nothing to say."""

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from cgpusched.cli import smi
from cgpusched.commands import Create
from cgpusched.daemon.devices import Devices
from cgpusched.daemon.status import Status
from cgpusched.driver.find import Driver

GIB, MIB = 1 << 30, 1 << 20

# The original's published sample, with our product's name and a version of the same length.
PUBLISHED = """\
|  cgpufs                               cgpufs Version:  1.0.2
+---+----------------+----------+----------------+-----------------------+
|GPU|       pod      | highprio | GPU-Util/Limit | GPU Memory Usage/Total|
+===+================+==========+================+=======================+
|  0| 7db8fff70a0d   |    0     |     41/ 50     |           9459/11463  |
|  0| 91b1e19795ee   |    0     |     30/ 50     |           9457/11463  |
+---+----------------+----------+----------------+-----------------------+"""


def row(short: str, percent: float, used: int, total: int = 11463, **more: Any) -> dict[str, Any]:
    return {"short": short, "highprio": False, "percent": percent, "entitled": 50.0, "mem_used": used * MIB,
            "mem_limit": total * MIB, "shut": False, "audit": {"unhooked": [], "unexplained": [], "excess": 0},
            **more}  # fmt: skip


def status(*rows: dict[str, Any], simulated: bool = False, index: int = 0) -> dict[str, Any]:
    return {"version": "1.0.2", "simulated": simulated, "gpus": [{"index": index, "instances": list(rows)}]}


def test_the_published_table() -> None:
    assert smi.table(status(row("7db8fff70a0d", 41.4, 9459), row("91b1e19795ee", 29.6, 9457))) == PUBLISHED


def test_widths_hold_for_the_largest_values() -> None:
    lines = smi.table(
        status(row("abcdefghijkl", 100.0, 196608, 196608, entitled=100.0, highprio=True), simulated=True, index=15)
    ).splitlines()
    assert lines[0] == "|  cgpufs, simulated device             cgpufs Version:  1.0.2"
    assert lines[4] == "| 15| abcdefghijkl   |    1     |    100/100     |         196608/196608 |"
    assert {len(line) for line in lines[1:]} == {74}


def test_what_the_audit_found_stands_below_the_table() -> None:
    audit = {"unhooked": [70, 71], "unexplained": [72], "excess": 5 * MIB + 7}
    bad = row("run-3f2a91c7", 0, 9, audit=audit, shut=True)
    lines = smi.table(status(row("good", 0, 9), bad, index=3)).splitlines()
    assert lines[6:] == [
        smi.RULE,
        "GPU 3 run-3f2a91c7: past the hook: pid 70, 71; unexplained memory: pid 72; 5 MiB over; gate shut",
    ]


def test_nobody_there() -> None:
    assert smi.table(status()).splitlines()[-1] == smi.DOUBLE


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def test_shares_are_those_of_the_last_second(world_sync: Any) -> None:
    system, gate, devices = world_sync
    clock = Clock()
    answer = Status(system, devices, "/tree", clock)
    system.apply(Create("one", (0,), (GIB,)))
    for second, busy in enumerate((0, 0, 250_000_000)):
        clock.now, gate.busy_ns[("one", 0)] = second * 10**9, busy
        system.sample(clock.now)
    told = answer.answer()
    told = json.loads(json.dumps(told))
    (one,) = told["gpus"][0]["instances"]
    assert one["percent"] == 25.0 and one["entitled"] == 100.0
    assert told["simulated"] is True and told["uptime_s"] == 2.0 and told["mount"] == "/tree"
    assert told["gpus"][0]["free_weight"] == 19 and told["gpus"][0]["free_memory"] == 23 * GIB
    line = "|  0| one            |    0     |     25/100     |              0/1024   |"
    assert smi.table(told).splitlines()[4] == line


async def test_sampling_goes_on(world_sync: Any, autojump_clock: Any) -> None:
    system, _, devices = world_sync
    seen: list[int] = []
    system.sample = seen.append
    with trio.move_on_after(3.5):
        await Status(system, devices, "/tree", lambda: 7).sample_forever()
    assert seen == [7, 7, 7, 7]


@pytest.fixture
def world_sync(gate: Any, gpus: Any) -> Any:
    from cgpusched.daemon.system import System
    from cgpusched.state import State

    return System(State(gpus), gate), gate, Devices(tuple(gpus), Driver(Path("/a"), Path("/b")), Path("/sim"))


def test_no_daemon(tmp_path: Path, capsys: Any) -> None:
    assert smi.main(["--socket", str(tmp_path / "none.sock")]) == 3
    assert capsys.readouterr().err.startswith("cgpu-smi: cgpud is not running: nobody answers at ")


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf", "soon", "1e9", ""])
def test_bad_loops(seconds: str, capsys: Any) -> None:
    with pytest.raises(SystemExit) as info:
        smi.main(["-l", seconds])
    assert info.value.code == 2


def test_json_and_loop(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(smi.link, "ask", lambda path, do: {"ok": True, **status(row("one", 1.0, 2))})
    assert smi.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out) == status(row("one", 1.0, 2))
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(smi.time, "sleep", sleep)
    assert smi.main(["--json", "--loop", "2"]) == 130
    assert slept == [2.0] * 3
    assert [json.loads(line)["version"] for line in capsys.readouterr().out.splitlines()] == ["1.0.2"] * 3
