"""Whatever comes to the daemon's sockets: it stays up, keeps nothing of it, and serves the others."""

from __future__ import annotations

import array
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutate import CASES, SEED
from node import Node, descriptors, running_node, settled_descriptors, wait_until

HELLO = struct.pack("<IIII48x", 0x75706763, 1, 4242, 0)
KNOCKS = max(CASES // 5, 20)
"""Of each kind: a knock takes a few milliseconds."""
GROWTH_MAX = 64 << 20
"""Bytes by which the daemon may grow, whatever the number of knocks."""

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="cgpud needs root")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with running_node(tmp_path, "2x24GiB") as one:
        one.ctl("create", "knocked", "--mem", "1GiB")
        one.ctl("create", "other", "--mem", "1GiB")
        yield one


def pid(node: Node) -> int:
    assert node.daemon
    return node.daemon.pid


def resident(node: Node) -> int:
    return int(Path(f"/proc/{pid(node)}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serves(node: Node, ident: str) -> None:
    """A program of that instance is let in and gets its pages."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(10)
        sock.connect(str(node.runtime / "inst" / ident / "gate.sock"))
        sock.send(HELLO)
        welcome, ancillary, _, _ = sock.recvmsg(65536, socket.CMSG_SPACE(64))
    fds = array.array("i")
    for _, _, content in ancillary:
        fds.frombytes(content)
    for fd in fds:
        os.close(fd)
    assert struct.unpack_from("<i", welcome, 8) == (0,) and len(fds) == 4


@pytest.mark.timeout(120 + CASES // 10)
def test_the_sockets_stand_whatever_comes(node: Node, tmp_path: Path) -> None:
    for ident in ("knocked", "other"):
        serves(node, ident)
    wait_until(lambda: not any(one["processes"] for one in node.status()["gpus"][0]["instances"]), "these to be gone")
    sockets = {"gate": node.runtime / "inst/knocked/gate.sock", "control": node.runtime / "control.sock",
               "runtime": node.runtime / "runtime.sock"}
    folder = tmp_path / "bundles"
    folder.mkdir()
    before, size, daemon = settled_descriptors(pid(node)), resident(node), pid(node)
    knock = [sys.executable, Path(__file__).parent / "knock.py"]
    programs = [subprocess.Popen([*knock, path, kind, str(SEED), str(KNOCKS), folder], stderr=subprocess.PIPE)
                for kind, path in sockets.items()]  # fmt: skip
    try:
        while any(program.poll() is None for program in programs):
            serves(node, "other")
            assert node.read("version")
    finally:
        for program in programs:
            program.kill()
            program.wait()
            assert program.stderr
            said = program.stderr.read()
            program.stderr.close()
    assert [program.returncode for program in programs] == [0, 0, 0], said.decode()
    assert pid(node) == daemon and node.daemon and node.daemon.poll() is None
    serves(node, "knocked")
    # What a knock could register: instances of cgpuctl's requests are ended here, containers go with the process that
    # stood for them.
    for ident in [one["id"] for one in node.status()["gpus"][0]["instances"] if one["id"] not in ("knocked", "other")]:
        node.ctl("destroy", ident, check=False)
    wait_until(lambda: sorted(os.listdir(node.runtime / "inst")) == ["knocked", "other"], "the containers to go")
    wait_until(lambda: not descriptors(pid(node)) - before, f"{descriptors(pid(node))} to be {before} again")
    assert os.listdir(node.runtime / "ct") == []
    assert resident(node) - size < GROWTH_MAX
    log = node.log.read_text()
    assert all(words in log for words in ("client dropped", "runtime dropped", " refused ")), "the knocks were heard"
    lines = log.splitlines()
    assert not [line for line in lines if "Traceback" in line or " error " in line or "connection failed" in line]
    assert len(lines) < 3 * KNOCKS, "what a tenant can provoke must not fill the journal"
