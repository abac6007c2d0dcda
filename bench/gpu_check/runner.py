"""Runs the checks one after the other, each in a process of its own, within a budget of time."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path

import checks
import machine as facts
from daemon import Daemon, Failed, Site
from machine import HERE, STATE, Machine, Skip
from results import FAILED, PASSED, SKIPPED, Finding, Recorder, read, table

BUDGET_S = 450.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Checks and measures cgpufs on this machine's GPU.")
    parser.add_argument("--out", type=Path, help="the JSON (default: build/gpu-check/DEVICE.json)")
    parser.add_argument("--only", action="append", choices=list(checks.CHECKS), metavar="CHECK",
                        help=f"only this one (again for more): {', '.join(checks.CHECKS)}")
    parser.add_argument("--budget", type=float, default=BUDGET_S, metavar="SECONDS",
                        help="time for all of them together (default: %(default)s)")
    parser.add_argument("--simulated", action="store_true", help="on the simulated device: a test of the checks")
    parser.add_argument("--no-tree", action="store_true", help="as where FUSE is missing")
    parser.add_argument("--carry", action="store_true", help="fill build/gpu-check/carried, and end")
    parser.add_argument("--one", nargs=2, metavar=("CHECK", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return one_check(options.one[0], Path(options.one[1]))
    if options.carry:
        from carry import carry

        return carry()
    if os.geteuid():
        print("gpu-check: must run as root: it mounts a file system and starts cgpud", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the daemon is ended, too
    STATE.mkdir(parents=True, exist_ok=True)
    noexec = os.statvfs(tempfile.gettempdir()).f_flag & os.ST_NOEXEC
    with tempfile.TemporaryDirectory(prefix="gpu-check-", dir=STATE if noexec else None) as scratch:
        Path(scratch).chmod(0o755)
        return check_all(options, Path(scratch))


def check_all(options: argparse.Namespace, scratch: Path) -> int:
    begin = time.monotonic()
    machine = Machine(options.simulated)
    daemon = Daemon(machine, scratch, tree=not options.no_tree)
    findings: list[Finding] = []
    try:
        try:
            prepare(machine, daemon, scratch)
        except (Skip, Failed, OSError, ValueError) as error:
            print(f"gpu-check: nothing can be checked: {error}", file=sys.stderr)
            return 2
        print(f"{machine.device}, driver {machine.driver}, {machine.memory >> 20} MiB; "
              f"tree: {machine.fuse or 'yes'}", flush=True)
        findings.append(Finding("setup", PASSED, seconds=time.monotonic() - begin, notes=notes(machine)))
        for name in options.only or checks.CHECKS:
            findings.append(check(name, machine, daemon, scratch, options.budget - (time.monotonic() - begin)))
            print(f"{name}: {findings[-1].status} {findings[-1].reason}".rstrip(), flush=True)
    finally:
        daemon.stop()
        if daemon.log.exists():
            shutil.copy(daemon.log, STATE / "cgpud.log")
    out = options.out or STATE / (re.sub(r"[^A-Za-z0-9]+", "-", machine.device).strip("-") + ".json")
    write(out, machine, findings, time.monotonic() - begin)
    print(f"\n{table(findings, machine.device)}; {time.monotonic() - begin:.0f} s; written to {out}")
    return 1 if any(one.status == FAILED for one in findings) else 0


def prepare(machine: Machine, daemon: Daemon, scratch: Path) -> None:
    """Finds what there is and starts the daemon. Skip or Failed where nothing can be checked."""
    machine.python_path = facts.python_path()
    machine.programs = facts.build_programs(scratch)
    if missing := set(facts.PROGRAMS) - set(machine.programs):
        raise Skip(f"no gcc, and build/gpu-check/carried has no {', '.join(sorted(missing))} that runs here")

    def find(call: str) -> str:
        code = f"import cgpusched.driver.find as find; print(find.{call})"
        return facts.run(sys.executable, "-c", code, env=facts.with_path(machine.python_path)).stdout.strip()

    if machine.simulated:
        machine.sim_lib = find("packaged('sim/libcuda.so.1').parent")
    else:
        machine.pythons = facts.pythons()
        machine.libraries = facts.libraries(machine.pythons.values())
        machine.nvidia_smi = shutil.which("nvidia-smi") or ""
        if find("find_driver()") in ("", "None"):
            raise Skip("no NVIDIA driver was found (--simulated tries the checks themselves)")
    daemon.start()
    site = Site(machine)
    card = site.ask("status")["gpus"][0]
    machine.device, machine.memory = card["name"], card["memory"]
    machine.driver = site.json(None, sys.executable, HERE / "programs/nvml_program.py",
                               PYTHONPATH=":".join(machine.python_path))["driver"]


def notes(machine: Machine) -> list[str]:
    found = {**machine.libraries, **machine.pythons, "nvidia-smi": machine.nvidia_smi}
    return [*(f"{name}: {path}" for name, path in found.items() if path),
            "the tree: " + (f"no: {machine.fuse}" if machine.fuse else "served through FUSE")]


def check(name: str, machine: Machine, daemon: Daemon, scratch: Path, left: float) -> Finding:
    """Runs one check in a process group of its own, and ends all of that."""
    wanted = checks.CHECKS[name].seconds
    if left < wanted / 2:
        return Finding(name, SKIPPED, f"{max(0.0, left):.0f} s of the budget are left, and it may take {wanted:.0f}")
    try:
        if not daemon.alive():
            daemon.start()
    except Failed as error:
        return Finding(name, FAILED, f"cgpud does not come up again: {error}")
    limit = min(wanted, left)
    folder = scratch / f"check-{name}"
    folder.mkdir()
    machine.write(folder / "machine.json")
    begin = time.monotonic()
    with open(folder / "stderr", "wb") as errors:
        process = subprocess.Popen([sys.executable, HERE, "--one", name, folder], stderr=errors, start_new_session=True)
    try:
        process.wait(limit)
        otherwise = (folder / "stderr").read_text(errors="replace").strip().splitlines()[-1:] or ["it ended early"]
    except subprocess.TimeoutExpired:
        otherwise = [f"not done after {limit:.0f} s"]
    finally:
        kill_group(process)
        clear(machine)
    finding = read(folder / "result", name, otherwise[0])
    if not daemon.alive():
        finding.status, finding.reason = FAILED, f"cgpud ended: {(daemon.log.read_text().splitlines() or ['?'])[-1]}"
    finding.seconds = time.monotonic() - begin
    return finding


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """The check and the programs that it left; they are all in its group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def clear(machine: Machine) -> None:
    """Destroys the instances that a check had no time for."""
    with contextlib.suppress(OSError, Failed):
        site = Site(machine)
        site.instances = [one["id"] for one in site.ask("list")["instances"]]
        site.close()


def one_check(name: str, folder: Path) -> int:
    """The body of the process of one check."""
    machine = Machine.read(folder / "machine.json")
    recorder = Recorder(folder / "result", machine.device, machine.simulated)
    site = Site(machine)
    try:
        try:
            checks.CHECKS[name].body(site, recorder)
        finally:
            site.close()
    except Skip as reason:
        recorder.end(SKIPPED, str(reason))
    except Failed as reason:
        recorder.end(FAILED, str(reason))
    except Exception as error:
        traceback.print_exc()
        recorder.end(FAILED, f"the check itself: {type(error).__name__}: {error}")
    else:
        recorder.end(FAILED if recorder.missed else PASSED, "; ".join(recorder.missed))
    return 0


def write(path: Path, machine: Machine, findings: list[Finding], seconds: float) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({
        "device": machine.device, "driver": machine.driver, "memory": machine.memory, "simulated": machine.simulated,
        "tree": not machine.fuse, "seconds": round(seconds, 1), "libraries": machine.libraries,
        "pythons": machine.pythons,
        "checks": [dataclasses.asdict(one) for one in findings],
    }, indent=1) + "\n")
