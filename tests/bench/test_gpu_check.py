"""``make gpu-check``'s own logic, on the simulated device: what real libraries it would run is skipped, and says so."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from node import ROOT, wait_until

FOLDER = ROOT / "bench/gpu_check"


def gpu_check(out: Path, *arguments: object, env: dict[str, str] | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, FOLDER, "--out", out, *map(str, arguments)], capture_output=True, text=True,
                          timeout=100, check=False, env=env)


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "no tree"])
def test_every_check_passes_or_says_why_not(tmp_path, tree):
    done = gpu_check(tmp_path / "out.json", "--simulated", *([] if tree else ["--no-tree", "--only", "quota",
                                                                              "--only", "resized", "--only", "graphs"]))
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    checks = {one["name"]: one for one in result["checks"]}
    assert result["simulated"] and result["tree"] == tree
    assert {one["status"] for one in checks.values()} == {"passed", "skipped"}
    assert all(one["reason"] for one in checks.values() if one["status"] == "skipped")
    assert checks["quota"]["status"] == checks["graphs"]["status"] == "passed"
    assert checks["resized"]["status"] == ("passed" if tree else "skipped")
    figures = [figure for one in checks.values() for figure in one["figures"]]
    assert figures and {figure["device"] for figure in figures} == {result["device"]} == {"cgpufs simulated GPU"}
    if tree:
        assert {"context_counted", "launch_added", "ratio", "combined", "kill_longest_wait"} <= {
            figure["name"] for figure in figures}
        assert checks["torch"]["reason"].startswith("simulated")
    table = done.stdout[done.stdout.rindex("gpu-check on "):]
    assert all(f"\n{name} " in table for name in checks) and "0 failed" in table


def test_nothing_starts_without_time(tmp_path):
    done = gpu_check(tmp_path / "out.json", "--simulated", "--budget", 1, "--only", "ratio")
    checks = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert done.returncode == 0
    assert [one["status"] for one in checks] == ["passed", "skipped"] and "budget" in checks[1]["reason"]


def test_a_machine_without_a_driver_is_told_so(tmp_path):
    done = gpu_check(tmp_path / "out.json", env={**os.environ, "CGPU_DRIVER_DIR": str(tmp_path)})
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "no NVIDIA driver" in done.stderr


@pytest.fixture
def parts(monkeypatch, tmp_path):
    """The modules of the check, a machine and a daemon of it."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import checks
    import daemon
    import machine
    import results
    import runner

    here = machine.Machine(True)
    server = daemon.Daemon(here, tmp_path, tree=False)
    try:
        runner.prepare(here, server, tmp_path)
        yield runner, checks, results, here, server
    finally:
        server.stop()


def test_one_that_hangs_or_fails_stops_no_other(parts, monkeypatch, tmp_path):
    runner, checks, results, machine, daemon = parts
    monkeypatch.setitem(checks.CHECKS, "ratio", checks.Check(checks.CHECKS["ratio"].body, 1.2))
    hung = runner.check("ratio", machine, daemon, tmp_path, 100)
    assert (hung.status, hung.reason) == ("failed", "not done after 1 s")
    assert runner.Site(machine).ask("list")["instances"] == []
    load = machine.programs["load"]
    wait_until(lambda: load.encode() not in b"".join(commands()), "its programs to be gone")

    monkeypatch.setitem(machine.programs, "memory", "/bin/false")
    failed = runner.check("quota", machine, daemon, tmp_path, 100)
    assert (failed.status, failed.reason) == ("failed", "false fill: status 1: ?")
    monkeypatch.undo()

    daemon.process.kill()
    daemon.process.wait()
    shutil.rmtree(tmp_path / "check-quota")
    assert runner.check("quota", machine, daemon, tmp_path, 100).status == "passed"
    table = results.table([hung, failed], "a card")
    assert "not done after 1 s" in table and "2 failed" in table


def commands():
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield file.read_bytes()
        except OSError:  # it ended meanwhile
            continue


def test_what_a_killed_check_wrote_is_kept(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(FOLDER))
    import results

    record = results.Recorder(tmp_path / "out", "a card", simulated=False)
    record.figure("launch_added", [3.0, 1.0, 2.0], "ns", {"clock": "cpu"}, 100.0, most=1.5)
    with (tmp_path / "out").open("a") as file:
        file.write('{"figure": {"na')
    found = results.read(tmp_path / "out", "launches", "not done after 60 s")
    assert (found.status, found.reason) == ("failed", "not done after 60 s")
    (figure,) = found.figures
    assert (figure.value, figure.bare, figure.runs, figure.device, figure.missed) == (2.0, 100.0, 3, "a card", True)
    assert "must be <= 1.5" in str(figure) and record.missed == [str(figure)]


def test_hand_overs_from_stamps(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    import check_time

    one = [(0, 10), (10, 20), (50, 60), (61, 70), (200, 210)]
    other = [(25, 35), (35, 45), (80, 90), (88, 99)]
    assert check_time.gaps_between([one, other]) == [5, 10]
    assert check_time.gaps_between([[(0, 10), (30, 40)], [(5, 25), (35, 50)]]) == [5]
