"""Three hundred processes of one instance that start at once: each gets its first allocation, and nothing stays."""

import subprocess
from pathlib import Path

from node import ROOT, Node, build_c, descriptors, settled_descriptors, wait_until
from soaked import GIB, MIB, environment, pages_of

from cgpusched.driver.find import packaged

PROCESSES = 300


def test_three_hundred_start_at_once(node: Node, tmp_path: Path) -> None:
    sim = packaged("sim/libcuda.so.1").parent
    program = build_c(ROOT / "bench/start_many.c", tmp_path / "start_many", "-Wall", "-Wextra", "-Werror", f"-L{sim}",
                      "-l:libcuda.so.1")
    node.ctl("create", "soaked", "--mem", "1GiB")
    assert node.daemon
    before = settled_descriptors(node.daemon.pid)
    with pages_of(node) as pages:
        for _ in range(2):
            with subprocess.Popen([program, str(PROCESSES), str(MIB), "hold"], env=environment(node, "soaked"),
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as many:
                assert many.stdout
                assert many.stdout.readline().split()[:1] == [str(PROCESSES)]
                assert sorted(pages.live().values()) == [MIB] * PROCESSES
                first, *lines = node.read(0, "soaked", "meminfo").splitlines()
                assert first == f"Free: {GIB - pages.other - PROCESSES * MIB}" and len(lines) == PROCESSES
                many.communicate(timeout=60)
            assert many.returncode == 0
            wait_until(lambda: pages.owned() == 0, "all slots to be given back")
            wait_until(lambda: node.read(0, "soaked", "meminfo") == f"Free: {GIB}\n", "all memory to come back")
    wait_until(lambda: not descriptors(node.daemon.pid) - before, "their descriptors to go")  # type: ignore[union-attr]
    assert "Traceback" not in node.log.read_text()
