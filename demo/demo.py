"""The main job, in under a minute: two programs share one GPU, and ``echo`` changes who gets what while both run.

Run by ``make demo``, as root. On a machine without an NVIDIA driver the daemon simulates a GPU, and says so. Everything
is what a user would type; this script only types it, and cleans up.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
BUILD = ROOT / "build" / "demo"
TREE = Path("/run/cgpu")
LOG = BUILD / "cgpud.log"
LOGS = ("c-program.log", "py-program.log")


def say(text: str) -> None:
    print(f"\n\033[1m# {text}\033[0m" if sys.stdout.isatty() else f"\n# {text}", flush=True)


def shell(command: str) -> None:
    """Shows a command as a user types it, and runs it."""
    print(f"$ {command}", flush=True)
    subprocess.run(["bash", "-c", command], env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}, check=False)


def watch(seconds: int) -> None:
    """Once a second, what each instance gets: the rows of cgpu-smi."""
    for number in range(seconds):
        time.sleep(1)
        table = subprocess.run([BIN / "cgpu-smi"], capture_output=True, text=True, check=False).stdout.splitlines()
        rows = [line for line in table if line.startswith("|")]
        heading = [line for line in rows if "GPU-Util" in line] if number == 0 else []
        for line in heading + [line for line in rows if "program" in line]:
            print(line, flush=True)


def start(*command: str, log: str) -> subprocess.Popen[bytes]:
    print(f"$ {' '.join(command)} &", flush=True)
    with open(BUILD / log, "wb") as out:
        return subprocess.Popen([BIN / command[0], *command[1:]], stdout=out, stderr=subprocess.STDOUT)


def stop(process: subprocess.Popen[bytes], sign: signal.Signals = signal.SIGTERM) -> None:
    if process.poll() is None:
        process.send_signal(sign)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_ready(daemon: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if daemon.poll() is not None:
            break
        # the control socket first: a stat of a half-made mount would wait for its daemon
        if subprocess.run([BIN / "cgpuctl", "list"], capture_output=True, check=False).returncode == 0 \
                and (TREE / "version").exists():
            return
        time.sleep(0.1)
    sys.exit(f"demo: the daemon did not come up; its log:\n{LOG.read_text()}")


def are_gone() -> bool:
    """Waits until the instances have ended: this demo's, or what one that was cut short has left in the state."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        listed = subprocess.run([BIN / "cgpuctl", "list"], capture_output=True, text=True, check=False)
        if listed.returncode == 0 and "-program" not in listed.stdout:
            return True
        time.sleep(0.1)
    return False


def check_running(programs: list[subprocess.Popen[bytes]]) -> None:
    for program in programs:
        if program.poll() is not None:
            said = "".join((BUILD / name).read_text() for name in LOGS)
            sys.exit(f"demo: a program has ended: {program.returncode}\n{said}")


def main() -> None:
    if os.geteuid() != 0:
        sys.exit("demo: must run as root: it mounts a file system")
    if subprocess.run([BIN / "cgpuctl", "list"], capture_output=True, check=False).returncode == 0:
        sys.exit("demo: cgpud is running on this machine already; stop it first")
    BUILD.mkdir(parents=True, exist_ok=True)
    busy = BUILD / "busy"
    subprocess.run(["gcc", "-O2", "-o", busy, ROOT / "demo/busy.c", "-ldl"], check=True)

    say("The daemon: GPUs from the NVIDIA driver, or a simulated one where there is none")
    print("$ cgpud &", flush=True)
    with open(LOG, "wb") as out:
        daemon = subprocess.Popen([BIN / "cgpud"], stdout=out, stderr=subprocess.STDOUT)
    programs: list[subprocess.Popen[bytes]] = []
    try:
        wait_ready(daemon)
        if not are_gone():
            sys.exit("demo: there are instances c-program or py-program already")
        shell(f"ls {TREE} {TREE}/0")
        say("A C program with weight 1 and 4 GiB, a Python program with weight 2 and 6 GiB: both want the whole GPU")
        programs.append(start("cgpuctl", "run", "--id", "c-program", "--mem", "4GiB", "--weight", "1", "--",
                              str(busy), "1000", "120", "512", log="c-program.log"))
        programs.append(start("cgpuctl", "run", "--id", "py-program", "--mem", "6GiB", "--weight", "2", "--",
                              sys.executable, str(ROOT / "demo/busy.py"), "1000", "120", log="py-program.log"))
        time.sleep(2)
        check_running(programs)
        shell(f"cat {TREE}/0/policy   # weight 2 switched it to weighted sharing")
        shell("cgpu-smi")
        watch(4)
        say("The same two under policy 1: half each")
        shell(f"echo 1 > {TREE}/0/policy")
        watch(4)
        say("Back to weights, now 3:1")
        shell(f"echo 2 > {TREE}/0/policy; echo 3 > {TREE}/0/c-program/weight; echo 1 > {TREE}/0/py-program/weight")
        watch(4)
        say("A weight of 0 pauses; nothing is lost")
        shell(f"echo 0 > {TREE}/0/c-program/weight")
        watch(3)
        shell(f"echo 1 > {TREE}/0/c-program/weight")
        say("Memory: what each process holds, and a limit changed while it runs")
        shell(f"cat {TREE}/0/c-program/meminfo")
        shell(f"echo 1GiB > {TREE}/0/c-program/memsize; cat {TREE}/0/c-program/meminfo")
        say("A bad value is refused, says why in the log, and changes nothing")
        shell(f"echo 1_0 > {TREE}/0/policy; cat {TREE}/0/policy")
        shell(f"tail -n 1 {LOG}")
        say("A third program with 1 GiB sees a 1 GiB card; beyond it gets CUDA's own out-of-memory error")
        shell(f"cgpuctl run --mem 1GiB -- {sys.executable} demo/busy.py memory 1100")
        check_running(programs)
        say("A killed program leaves nothing behind, and the other one the whole GPU (policy 1)")
        shell(f"echo 1 > {TREE}/0/policy")
        print("$ kill -9 (the Python program)", flush=True)
        stop(programs[1], signal.SIGKILL)
        watch(3)
        shell("cgpuctl list")
    finally:
        for program in programs:
            stop(program)
        left = daemon.poll() is None and not are_gone()
        stop(daemon)
    say("Cleaned up: the daemon is stopped and its tree unmounted")
    if os.path.ismount(TREE):
        sys.exit(f"demo: {TREE} is still mounted")
    if left:
        sys.exit("demo: instances are left, though their programs have ended")
    shutil.rmtree("/run/cgpud/inst", ignore_errors=True)
    for name in LOGS:
        lines = (BUILD / name).read_text().splitlines()
        print(f"the {name.removesuffix('.log')} said last: {lines[-1] if lines else 'nothing'}")


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
