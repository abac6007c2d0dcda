"""The C with the compiler's sanitizers: existing tests once more, and both sides of the gate in one process.

CGPU_SANITIZE_ALL=1 runs more of the tests so: some minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALL = os.environ.get("CGPU_SANITIZE_ALL") == "1"

CANARY = """
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
static long count;
static int32_t sum(int32_t a) { return a + INT32_MAX; }
static int gone(int at) { int *all = calloc(4, sizeof *all); free(all); return ((volatile int *)all)[at]; }
static void *add(void *unused) { count++; return unused; }
int main(int argc, char **argv)
{
    pthread_t other;
    pthread_create(&other, NULL, add, NULL);
    add(NULL);
    pthread_join(other, NULL);
    printf("%ld\\n", count);
    printf("%d\\n", argc == 2 ? gone(atoi(argv[1])) : sum(argc));
    return 0;
}
"""
"""A program with a race; with a number it reads what was freed, else it overflows."""
TESTS = ["memory/test_wrappers_memory.py", "gate/test_gate_server.py", "submit/test_submit_families.py",
         "runtime/test_runtime.py", "sim/test_sim_memory.py", "sim/test_sim_vmm.py", "sim/test_sim_pools.py",
         "sim/test_sim_graph_memory.py", "sim/test_sim_ipc.py", "sim/test_sim_context.py", "sim/test_sim_arrays.py"]
CLIENT = ["test_two_threads_wait_and_both_go", "test_early_acknowledgement_then_drained",
          "test_forked_child_joins_anew", "test_closed_descriptors_are_replaced",
          "test_idle_holder_lets_go_and_may_come_back"]
MORE = ["memory", "client/test_client_gate.py", "client/test_client_turns.py", "client/test_client_charging.py",
        "submit/test_submit_programs.py", "submit/test_submit_node.py", "sim", "nvml/test_nvml_agreement.py",
        "nvml/test_nvml_odd_drivers.py", "runtime/test_runtime.py", "driver/test_proxy_loading.py",
        "gate/test_gate_server.py", "gate/test_gate_gangs_whole.py",
        "e2e/test_two_programs.py", "fuzz/test_fuzz_pages.py"]  # fmt: skip


def canary(made: Any, *arguments: str) -> str:
    """What is said of the canary."""
    (made.folder / "canary.c").write_text(CANARY)
    program = made.compile(made.folder / "canary", made.folder / "canary.c", "-lpthread")
    done = subprocess.run([program, *arguments], env=made.env, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode, "it ended as if nothing were wrong"
    return done.stderr + str(made.said())


def test_a_bad_address_is_spoken_of(addresses: Any) -> None:
    """These three show that silence means something."""
    assert "heap-use-after-free" in canary(addresses, "2")


def test_undefined_behaviour_is_spoken_of(addresses: Any) -> None:
    assert "signed integer overflow" in canary(addresses)


def test_a_race_is_spoken_of(threads: Any) -> None:
    assert "data race" in canary(threads)


@pytest.mark.timeout(3600 if ALL else 300)
def test_no_bad_address_and_nothing_undefined(addresses: Any) -> None:
    """The tests of the hook, the client, the simulated driver, the gate and cgpu-runtime."""
    names = MORE if ALL else [*TESTS, *(f"client/test_client_gate.py::{name}" for name in CLIENT)]
    with tempfile.TemporaryDirectory(prefix="cgpu-") as base:  # short: a socket's path has 107 bytes
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--basetemp={base}/run",
                   *(f"tests/{name}" for name in names),
                   "--deselect=tests/sim/test_sim_vmm.py::test_killed_at_any_moment"]  # 17 busy processes, and slow
        done = subprocess.run(command, cwd=ROOT, env=addresses.env, check=False, capture_output=True, text=True)
    said = addresses.said()
    assert not said, said
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_race_between_the_two_sides(threads: Any) -> None:
    """both.c: scheduler, plans and figures on one side; three launchers and their agent on the other."""
    from cgpusched.driver.names import Driver
    from cgpusched.driver.proxy import install_proxies

    folder = threads.folder
    bare, hooked, tables = folder / "bare", folder / "hooked", folder / "generated"
    for place in (bare, hooked, tables):
        place.mkdir()
    include = [f"-I{ROOT}/csrc/{part}" for part in ("abi", "gate", "client", "hook")]
    shared = [*include, "-fPIC", "-shared", "-fvisibility=hidden"]
    plain = ["-fno-sanitize=all"]  # the driver is a stand-in of the tests: what it does wrong is not of interest
    cuda = threads.compile(bare / "libcuda.so.1", *shared, *plain, "tests/client/fakecuda.c",
                           "-Wl,-Bsymbolic,-soname,libcuda.so.1")
    nvml = threads.compile(bare / "libnvidia-ml.so.1", *shared, *plain, "tests/client/fakenvml.c",
                           "-Wl,-soname,libnvidia-ml.so.1")
    subprocess.run([sys.executable, ROOT / "csrc/tables/emit.py", tables], check=True)
    sources = {part: sorted((ROOT / "csrc" / part).glob("*.c")) for part in ("hook", "client", "gate")}
    hook = threads.compile(folder / "libcgpu-hook.so.1", *shared, f"-I{tables}", *sources["hook"], *sources["client"],
                           "-Wl,-soname,libcgpu-hook.so.1,-z,now,-z,nodelete", "-ldl", "-lpthread")
    install_proxies(Driver(cuda, nvml), hooked, hook)
    both = threads.compile(folder / "both", *include, "tests/sanitize/both.c", *sources["gate"], cuda,
                           "-Wl,--allow-shlib-undefined", "-lpthread")
    env = threads.env | {"CGPU_SOCKET": str(folder / "gate.sock"), "LD_LIBRARY_PATH": str(hooked)}
    done = subprocess.run([both, "60000" if ALL else "2000"], env=env, check=False, capture_output=True, text=True,
                          timeout=200)
    said = threads.said()
    assert not said, said
    assert done.returncode == 0, done.stdout + done.stderr
