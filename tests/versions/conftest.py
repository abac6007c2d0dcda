"""A node, and hooks of versions that are yet to come: the sources as they are, but for what a version would change."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from node import ROOT, Node, build_c, running_node

from cgpusched.driver.find import packaged
from cgpusched.driver.names import Driver
from cgpusched.driver.proxy import install_proxies

Change = tuple[str, str, str]
"""A file below csrc, what stands there, and what stands there then."""

MINOR: Sequence[Change] = (
    ("client/offer.c", ".flags = flags}", ".flags = flags | 1u << 31}"),
    ("client/offer.c", "    if (send(offer->sock, &hello", "    memset(hello.pad, 0xff, sizeof hello.pad);\n"
                                                            "    if (send(offer->sock, &hello"),
    ("client/offer.c", "    store_relaxed(&slot->pid,", "    memset(slot->pad4, 0xff, sizeof slot->pad4);\n"
                                                        "    store_relaxed(&slot->pid,"),
)  # fmt: skip
"""It says more: a flag and fields that nobody knows yet, in what were holes."""
MAJOR: Sequence[Change] = (
    ("abi/cgpu_abi.h", "#define CGPU_ABI_VERSION 1u", "#define CGPU_ABI_VERSION 2u"),
    ("abi/cgpu_abi.h", "    uint64_t pad[6];\n};\n#define CGPU_HELLO_INFO", "    uint64_t pad[16];\n};\n"
                                                                           "#define CGPU_HELLO_INFO"),
    ("abi/cgpu_abi.h", "sizeof(struct cgpu_hello) == 64", "sizeof(struct cgpu_hello) == 144"),
    ("hook/init.c", "proxy->abi != CGPU_ABI_VERSION", "proxy->abi != 1"),  # its own proxies would have its number
)
"""It speaks another protocol, from a longer hello on."""


def build_hook(out: Path, changes: Sequence[Change]) -> Path:
    """The folder with that hook and its proxies of the simulated driver."""
    source = out / "csrc"
    shutil.copytree(ROOT / "csrc", source, ignore=shutil.ignore_patterns("__pycache__", "sim", "runtime"))
    for name, old, new in changes:
        text = (source / name).read_text()
        assert text.count(old) == 1, (name, old)
        (source / name).write_text(text.replace(old, new))
    tables = out / "generated"
    tables.mkdir()
    subprocess.run([sys.executable, ROOT / "csrc/tables/emit.py", tables], check=True)
    hook = out / "libcgpu-hook.so.1"
    include = [f"-I{source / part}" for part in ("abi", "client", "hook")]
    sources = sorted([*source.glob("hook/*.c"), *source.glob("client/*.c")])
    subprocess.run(["gcc", "-std=gnu11", "-O1", "-fPIC", "-shared", "-fvisibility=hidden", *include, f"-I{tables}",
                    "-o", hook, *sources, "-Wl,-soname,libcgpu-hook.so.1,-z,now,-z,nodelete", "-ldl",
                    "-lpthread"], check=True)  # fmt: skip
    sim = packaged("sim/libcuda.so.1").parent
    install_proxies(Driver(sim / "libcuda.so.1", sim / "libnvidia-ml.so.1"), out / "lib", hook)
    return out / "lib"


@pytest.fixture(scope="session")
def minor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_hook(tmp_path_factory.mktemp("minor"), MINOR)


@pytest.fixture(scope="session")
def major(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_hook(tmp_path_factory.mktemp("major"), MAJOR)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("bin")
    sources = {"busy": ROOT / "demo/busy.c", "alloc": ROOT / "tests/e2e/alloc.c"}
    return {name: build_c(source, base / name) for name, source in sources.items()}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with running_node(tmp_path) as one:
        one.ctl("create", "one", "--mem", "1GiB")
        yield one


Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(node: Node) -> Iterator[Start]:
    """``start(lib, *command, socket=...)``: a program of instance ``one`` with the hook in that folder."""
    running: list[subprocess.Popen[str]] = []

    def begin(lib: Path, *command: Any, socket: Path | None = None) -> "subprocess.Popen[str]":
        env = {**os.environ, "LD_LIBRARY_PATH": str(lib), "CGPU_SIM_DIR": str(node.runtime / "sim"),
               "CGPU_SOCKET": str(socket or node.runtime / "inst/one/gate.sock"),
               "CGPU_LOG": str(node.base / "hook.log")}  # fmt: skip
        running.append(subprocess.Popen([*map(str, command)], env=env, text=True, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE))
        return running[-1]

    yield begin
    for program in running:
        program.kill()
        program.communicate()
