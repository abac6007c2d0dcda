"""What 0.1 wrote and said is read by later versions: its layout, messages and files lie in ``data/``, as they were.

These files are not to be changed. A release that says more adds a folder of its own.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from node import ROOT, wait_until

from cgpusched import store
from cgpusched.containers import wire as runtime_wire
from cgpusched.daemon.server import requests, wire
from cgpusched.daemon.survival.kept import KeeperStore
from cgpusched.daemon.tally import GpuTotals, Tally, Totals
from cgpusched.model import Gpu, GpuSettings, Policy, Share
from cgpusched.store import Process, StoredContainer

OLD = Path(__file__).parent / "data/0.1"
GIB = 1 << 30
FIRST, SECOND, THIRD = (f"GPU-0000000{index}-1111-2222-3333-444444444444" for index in range(3))
GPUS = [Gpu(index, uuid, "card", 24 * GIB) for index, uuid in enumerate((FIRST, SECOND, THIRD))]
CONTAINER = "c0ffee" * 8
UUIDS = [bytes(range(first, first + 16)) for first in (1, 2)]


def messages() -> dict[str, bytes]:
    rows = (line.split() for line in (OLD / "messages.txt").read_text().splitlines())
    return {name: bytes.fromhex(content) for name, content in rows}


def test_no_field_of_a_shared_page_or_message_has_moved(tmp_path: Path) -> None:
    """Programs of the version before have these offsets compiled in, and the daemon's pages mapped."""
    rows = [line.split() for line in (OLD / "layout.txt").read_text().splitlines()]
    assert len(rows) > 60
    code = ['#include <stdio.h>', '#include "cgpu_abi.h"', "int main(void) {"]
    for name, *_ in rows:
        struct, dot, field = name.partition(".")
        what = f"offsetof(struct {struct}, {field}), sizeof(((struct {struct} *)0)->{field})" if dot else (
            f"sizeof(struct {struct}), (size_t)0")  # fmt: skip
        code.append(f'printf("{name} %zu %zu\\n", {what});')
    (tmp_path / "now.c").write_text("\n".join([*code, "}"]))
    subprocess.run(["gcc", f"-I{ROOT}/csrc/abi", "-o", tmp_path / "now", tmp_path / "now.c"], check=True)
    told = subprocess.run([tmp_path / "now"], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[: len(row)] for line, row in zip(told, rows, strict=True)] == rows


def test_a_program_of_then_is_understood_and_understands() -> None:
    """What it says is taken, and every byte that it looks at in the answer is where it was."""
    said = messages()
    assert wire.parse_hello(said["hello"]) == wire.Hello(4242, 0)
    assert wire.parse_hello(said["hello-info"]).info_only
    shared = [wire.WelcomeGpu(UUIDS[0], 1, 7, 9, 3 * GIB, 24 * GIB)]
    welcome = wire.welcome("c0ffee", shared, [wire.NativeGpu(UUIDS[1], 0, 16 * GIB)])
    assert welcome == said["welcome"]
    assert wire.refusal("c0ffee", 11, "512 processes already") == said["refusal"]


def test_a_runtime_of_then_is_understood_and_understands() -> None:
    said, kind = messages(), runtime_wire.Kind
    asked = {name: runtime_wire.parse(said[name]) for name in ("create", "hook", "delete", "precreate")}
    assert asked["create"] == runtime_wire.Question(kind.CREATE, "c0ffee", "/run/bundle")
    assert asked["hook"].kind is kind.HOOK and json.loads(asked["hook"].state)["pid"] == 4242
    assert asked["delete"] == runtime_wire.Question(kind.DELETE, "c0ffee")
    assert asked["precreate"] == runtime_wire.Question(kind.PRECREATE)
    assert runtime_wire.Answer(1, "root\t/run/bundle/rootfs\n").packed() == said["answer"]
    assert runtime_wire.refusal(22, "no").packed() == said["answer-refusal"]


def test_requests_of_a_cgpuctl_of_then() -> None:
    for line in (b'{"do": "list"}', b'{"do": "status"}', b'{"do": "destroy", "id": "a"}',
                 b'{"do": "create", "id": "a", "gpus": [0], "memsize": [1], "weight": 1, "highprio": true}',
                 b'{"do": "run", "id": "a", "gpus": [0], "memsize": [1], "weight": 1, "highprio": true}'):  # fmt: skip
        assert requests.parse(line).do == json.loads(line)["do"]


def with_more(value: Any) -> Any:
    """As a later version may write it: something new in every object."""
    if isinstance(value, dict):
        return {**{key: with_more(one) for key, one in value.items()}, "colour": ["red", {"deep": 1}]}
    return [with_more(one) for one in value] if isinstance(value, list) else value


def later(content: bytes) -> bytes:
    data = json.loads(content)
    # names of GPUs, instances and processes are keys there: what is new cannot stand beside them
    plain = {key: data[key] for key in ("gpus", "anchors") if key in data}
    whole = with_more({key: value for key, value in data.items() if key not in plain})
    for key, named in plain.items():
        whole[key] = {name: with_more(one) for name, one in named.items()}
    return json.dumps(whole).encode()


@pytest.mark.parametrize("version", ["as it was", "with fields of a later one"])
def test_the_state_of_then(version: str) -> None:
    """All of it is there; the way back, from a later version to this one, loses nothing that this one knows."""
    content = (OLD / "state.json").read_bytes()
    stored = store.load(content if version == "as it was" else later(content))
    state, lines = store.restore(stored, GPUS, {}, 0, False)
    assert lines == [] and stored.boot == "boot-1" and state.default_memsize == 3 * GIB
    assert state.settings == {0: GpuSettings(Policy.WEIGHTED, 20, 30), 1: GpuSettings(Policy.FIXED, 24, 90),
                              2: GpuSettings()}  # fmt: skip
    found = {one.id: (one.shares, one.ephemeral, one.owner, one.native) for one in state.instances.values()}
    assert found == {
        "bare": ({1: Share(GIB, 7, True), 0: Share(2 * GIB, 2)}, False, 0, ()),
        "run-1": ({0: Share(GIB, 0)}, True, 1000, ()),
        CONTAINER: ({0: Share(GIB, 1)}, False, 0, (2,)),
    }
    assert stored.anchors == {"run-1": (Process(7, 99),)}
    assert stored.containers == (StoredContainer(CONTAINER, Process(8, 1), Process(9, 2)),)
    again = json.loads(store.dump(state, stored.boot, stored.anchors, stored.containers))
    assert {**again, "last": ""} == {**json.loads(content), "last": ""}


def test_a_state_of_a_later_major_version_is_refused() -> None:
    data = json.loads((OLD / "state.json").read_bytes())
    with pytest.raises(store.StoreError, match=r"its version is not one that this daemon knows: 1-\d"):
        store.load(json.dumps({**data, "version": store.VERSION + 1}).encode())


def given(folder: Path) -> dict[str, bytes]:
    """What the keeper gives to the next daemon: names, and what the files behind them say."""
    store_ = KeeperStore(folder)
    held = store_.connect()
    store_.close()
    try:
        return {name: os.pread(fd, 20, 0) for name, fd in held.items()}
    finally:
        for fd in held.values():
            os.close(fd)


def test_a_keeper_of_then(tmp_path: Path) -> None:
    """It outlives any number of daemons, and is not replaced by theirs: each speaks with it as its own did."""
    first, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.run([sys.executable, "-I", "-S", OLD / "keeper.txt", tmp_path, "60"], stdin=theirs, check=True,
                       timeout=30)  # fmt: skip
    now = KeeperStore(tmp_path)
    try:
        assert now.connect() == {}
        for name in ("tree.0-7", "view.0-8"):
            (tmp_path / name).write_text(name)
            with open(tmp_path / name) as file:
                now.put(name, file.fileno())
        now.drop("view.0-8")
        wait_until(lambda: given(tmp_path) == {"tree.0-7": b"tree.0-7"}, "what it was told, and no more")
        now.end()
        wait_until(lambda: not (tmp_path / "keeper.sock").exists(), "its end")
    finally:
        now.close()
        first.close()


def test_the_counters_of_then() -> None:
    content = (OLD / "counters.json").read_bytes()
    for one in (content, later(content)):
        tally = Tally.load(one, "boot-1")
        assert tally.of("bare", FIRST) == Totals(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
        assert tally.of_gpu(FIRST) == GpuTotals(11, 12)


def test_the_limits_of_then() -> None:
    """The hook reads this file when no daemon answers: a line that it does not know would leave a program unlimited."""
    assert store.limits((OLD / "limits").read_text()) == (((FIRST, Share(GIB)),), (THIRD,))
