"""A booted systemd that runs cgpud as ``cgpuctl setup systemd`` installed it, and containers on it."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import engines
from node import wait_until
from nspawn import Machine, machine
from world import ASKS, Bundles, low_level, make_image

DROP_IN = "/run/systemd/system/cgpud.service.d/test.conf"
CONFIG = "/etc/cgpu/config.toml"
STORED = 7  # two mounts, what each was opened with, two listening sockets, the configuration
WORK = """
(busy 1000 1000 64 >/tmp/busy 2>&1; echo "busy ended with $?" >/tmp/ended) &
rounds=0
while :; do
    read version </run/cgpu/version && read held </run/cgpu/0/$SHORT/memsize || echo "round $rounds" >>/tmp/failed
    rounds=$((rounds + 1))
    echo $rounds >/tmp/rounds
    sleep 0.02
done
"""


@dataclasses.dataclass
class Container:
    """One that computes without pause (demo/busy.c) and reads its view without pause."""

    host: Host
    ident: str
    folder: Path
    """Its /tmp."""

    @property
    def short(self) -> str:
        return self.ident[:12]

    def rounds(self) -> int:
        """How often it has read its view."""
        try:
            return int((self.folder / "rounds").read_text())
        except (FileNotFoundError, ValueError):  # being written
            return 0

    def failed(self) -> str:
        """What it could not read."""
        path = self.folder / "failed"
        return path.read_text() if path.exists() else ""

    def seconds(self) -> int:
        """For how many seconds its program has computed."""
        path = self.folder / "busy"
        return path.read_text().count("\n") if path.exists() else 0

    def mount(self) -> str:
        """Its line of its own view in /proc/PID/mountinfo."""
        pid = (self.folder.parents[1] / "pid").read_text()
        lines = self.host.machine("cat", f"/proc/{pid}/mountinfo").stdout.splitlines()
        (found,) = (line for line in lines if line.split()[4] == "/run/cgpu")
        return found


def read_on(*containers: Container) -> None:
    """Each reads its view again, whatever comes of it."""
    before = [one.rounds() for one in containers]
    for one, rounds in zip(containers, before, strict=True):
        wait_until(lambda one=one, rounds=rounds: one.rounds() > rounds + 5, f"{one.short} to read its view", 60)


def compute_on(*containers: Container) -> None:
    """The program of each goes on."""
    before = [one.seconds() for one in containers]
    for one, seconds in zip(containers, before, strict=True):
        wait_until(lambda one=one, seconds=seconds: one.seconds() > seconds, f"{one.short} to compute", 60)
        assert not (one.folder / "ended").exists(), (one.folder / "busy").read_text()


def go_on(*containers: Container) -> None:
    """They compute and read, and have always read what they wanted to."""
    read_on(*containers)
    compute_on(*containers)
    assert [one.failed() for one in containers] == [""] * len(containers)


class Host:
    """The guest, as its administrator sees it."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.runc = machine.shared / "runc"
        """What makes its containers; there once there were any."""
        self._image = machine.shared / "image.tar"
        self._made = 0

    def systemctl(self, *words: str, check: bool = True) -> str:
        return self.machine("systemctl", *words, check=check).stdout.strip()

    def show(self, name: str, unit: str = "cgpud") -> str:
        return self.systemctl("show", unit, "--value", "--property", name)

    @property
    def pid(self) -> int:
        return int(self.show("MainPID"))

    def signal(self, name: str, pid: int) -> None:
        self.machine("sh", "-c", f"kill -{name} {pid}")  # the shell's own: not everywhere is another

    def stored(self) -> int:
        """How many descriptors systemd keeps for the unit."""
        return int(self.show("NFileDescriptorStore"))

    def active(self) -> bool:
        return self.show("ActiveState") == "active"

    def wait_for_another(self, pid: int) -> None:
        """Until a daemon that is not ``pid`` is ready."""
        try:
            wait_until(lambda: self.pid not in (0, pid) and self.active(), "another cgpud", 60)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.journal()}") from None

    def journal(self, lines: int = 15) -> str:
        return self.machine("journalctl", "--unit=cgpud", "--output=cat", "--no-pager", f"--lines={lines}").stdout

    def logged(self, text: str, lines: int = 15) -> None:
        """Returns when the journal's last lines say so: what it is told takes a moment."""
        wait_until(lambda: text in self.journal(lines), f"the journal to say: {text}")

    def mounts(self) -> list[str]:
        """Places and devices of what cgpud has mounted, as PID 1 sees them."""
        lines = self.machine("cat", "/proc/1/mountinfo").stdout.splitlines()
        return sorted(f"{line.split()[4]} {line.split()[2]}" for line in lines if " fuse.cgpufs " in line)

    @contextmanager
    def drop_in(self, *lines: str) -> Iterator[None]:
        """More lines for the unit, for this long."""
        path = self.machine.path(DROP_IN)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(["[Service]", *lines, ""]))
        self.systemctl("daemon-reload")
        try:
            yield
        finally:
            path.unlink()
            self.systemctl("daemon-reload")

    @contextmanager
    def config(self, more: str) -> Iterator[None]:
        """More lines for the configuration, for this long."""
        path = self.machine.path(CONFIG)
        was = path.read_text()
        path.write_text(f"{was}{more}\n")
        try:
            yield
        finally:
            path.write_text(was)

    def instances(self) -> dict[str, dict[str, Any]]:
        """What cgpu-smi --json shows of each."""
        status = json.loads(self.machine("cgpu-smi", "--json").stdout)
        return {one["id"]: one for one in status["gpus"][0]["instances"]}

    def ratio(self, one: str, two: str) -> float:
        """The device time of two over that of one, over the next second."""
        before = self.instances()
        time.sleep(1)
        after = self.instances()
        first, second = (after[ident]["busy_ns"] - before[ident]["busy_ns"] for ident in (one, two))
        return second / max(first, 1)

    def shares_are_one_to_two(self, one: Container, two: Container) -> None:
        wait_until(lambda: 1.7 < self.ratio(one.ident, two.ident) < 2.35, "shares of 1 to 2", 60)

    @contextmanager
    def containers(self) -> Iterator[SystemdBundles]:
        """Skips the test where there is no runc, or it makes none here."""
        first = not self._made
        self._made += 1
        base = self.machine.shared / f"containers-{self._made}"
        base.mkdir()
        if first:
            self.runc.symlink_to(low_level(engines.fetch(), self.machine.shared))
            make_image(self.machine.shared)
        made = SystemdBundles(self, base, self._image)
        try:
            if first:
                made.probe()
            yield made
        finally:
            made.close()


class SystemdBundles(Bundles):
    """Containers of cgpu-runtime and runc inside the guest, each in a scope that systemd makes."""

    def __init__(self, host: Host, base: Path, image: Path) -> None:
        node: Any = SimpleNamespace(binary=Path("/var/lib/cgpud/bin/cgpu-runtime"))
        super().__init__(node, host.runc, base, image, "/cgpu-test", *host.machine.enter)
        self.host = host
        self.driver = "systemd"

    def popen(self, *words: Path | str, **options: Any) -> Any:
        return super().popen(*(["--systemd-cgroup"] if self.driver == "systemd" else []), *words, **options)

    def make(self, ident: str, *env: str, pid_host: bool = False, **options: Any) -> Path:
        bundle = super().make(ident, *env, **options)
        config = bundle / "config.json"
        spec = json.loads(config.read_text())
        if self.driver == "systemd":
            spec["linux"]["cgroupsPath"] = f"system.slice:docker:{ident}"
        if pid_host:
            spec["linux"]["namespaces"] = [one for one in spec["linux"]["namespaces"] if one["type"] != "pid"]
        config.write_text(json.dumps(spec))
        return bundle

    def registered(self) -> list[str]:
        return sorted(self.host.instances()) if self.host.active() else []

    def start(self, letter: str, *env: str, command: str = WORK, **options: Any) -> Container:
        """A container with an ID as Docker makes them, and 6 of 15 parts of the GPU's memory."""
        ident = letter * 64
        self.create(ident, *ASKS, *env, f"SHORT={letter * 12}", command=("sh", "-c", command), **options)
        self("start", ident)
        return Container(self.host, ident, self.base / f"bundle-{ident}/rootfs/tmp")


@contextmanager
def installed(base: Path) -> Iterator[Host]:
    """A guest in which cgpud was set up."""
    with machine(base) as guest:
        host = Host(guest)
        guest.path(CONFIG).parent.mkdir()
        guest.path(CONFIG).write_text(f'simulate = "1x24GiB"\npolicy = 2\nruntimes = ["{host.runc}"]\n')
        guest("cgpuctl", "setup", "systemd")
        yield host
