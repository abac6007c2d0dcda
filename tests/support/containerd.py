"""The distribution's containerd on its own, with all its folders below one, its client ctr, and its CRI service."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Sequence
from pathlib import Path

import cri
import engines
import pytest
from node import wait_until

IMAGE = "docker.io/library/tiny:latest"
NODE = 2  # of cri-api's NamespaceMode: the pod has the node's network


class Containerd:
    """Call it with ctr's arguments. ``config`` is the caller's to write before the start."""

    def __init__(self, root: Path, base: Path, parent: str) -> None:
        self.base = base
        self.parent = parent
        self.env = engines.environment(root)
        self.config = base / "config.toml"
        self.socket = base / "containerd.sock"
        self.log = base / "containerd.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.pods: list[str] = []

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(["containerd", f"--config={self.config}"], env=self.env, stdout=log,
                                            stderr=log, stdin=subprocess.DEVNULL)
        wait_until(self._answers, f"containerd, whose log says:\n{self.log.read_text()[-2000:]}", 60)

    def _answers(self) -> bool:
        assert self.process
        if self.process.poll() is not None:
            pytest.skip(f"containerd does not run here: {self.log.read_text()[-600:]}")
        try:
            return bool(self._ask("Status", b""))
        except (OSError, cri.Refused):  # not there, or its CRI service is not yet
            return False

    def restart(self) -> None:
        """Containers have a process of their own between, and go on."""
        assert self.process
        engines.end(self.process, "containerd", 40)
        self.start()

    def __call__(self, *arguments: Path | str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """ctr, in the namespace that CRI's images are in."""
        command = ["ctr", "--address", self.socket, "--namespace", "k8s.io", *arguments]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, check=False, timeout=90,
                              stdin=subprocess.DEVNULL)
        assert not check or done.returncode == 0, f"ctr {' '.join(map(str, arguments))}: {done.stdout}{done.stderr}"
        return done

    def program(self, *arguments: Path | str) -> str:
        """What containerd itself prints."""
        command = ["containerd", *arguments]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=True).stdout

    def own(self, name: str) -> tuple[Path | str, ...]:
        """Options of ``ctr run`` for a container that leaves nothing elsewhere."""
        return ("--snapshotter", "native", "--cgroup", f"{self.parent}/{name}", "--runc-root", self.base / "runc")

    def load(self, tar: Path) -> None:
        """Makes IMAGE of a root file system."""
        layer = tar.read_bytes()
        config = {"architecture": "amd64", "os": "linux", "config": {"Cmd": ["sleep", "1000"], "Env": ["PATH=/bin"]},
                  "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]}}
        manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
        with tarfile.open(self.base / "image.tar", "w") as archive:
            for name, content in {"config.json": json.dumps(config).encode(), "layer.tar": layer,
                                  "manifest.json": json.dumps(manifest).encode()}.items():
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
        self("images", "import", "--snapshotter", "native", self.base / "image.tar")
        image = cri.message((1, cri.message((1, IMAGE))))
        wait_until(lambda: cri.call(self.socket, "ImageService/ImageStatus", image), "CRI to know the image")

    # A pod, as a kubelet makes it

    def pod(self, name: str, handler: str = "") -> str:
        """A sandbox with the node's network; its ID."""
        network = cri.message((1, NODE))
        linux = cri.message((1, self.parent), (2, cri.message((1, network))))
        self._config = cri.message((1, cri.message((1, name), (2, name), (3, "default"))), (8, linux))
        request = cri.message((1, self._config), (2, handler))
        pod = cri.text(self._ask("RunPodSandbox", request), 1)
        self.pods.append(pod)
        return pod

    def container(self, pod: str, env: Sequence[str] = ()) -> str:
        """A container that is made and not started; its ID."""
        pairs = [(6, cri.message((1, key), (2, value))) for key, _, value in (entry.partition("=") for entry in env)]
        network = cri.message((3, cri.message((1, NODE))))
        config = cri.message((1, cri.message((1, "one"))), (2, cri.message((1, IMAGE))), *pairs,
                             (15, cri.message((2, network))))
        return cri.text(self._ask("CreateContainer", cri.message((1, pod), (2, config), (3, self._config))), 1)

    def begin(self, container: str) -> None:
        self._ask("StartContainer", cri.message((1, container)))

    def execute(self, container: str, *command: str) -> tuple[int, str]:
        """What a program in it ends with and prints, both ways."""
        words = [(2, word) for word in command]
        answer = self._ask("ExecSync", cri.message((1, container), *words, (3, 30)))
        code = cri.fields(answer).get(3, [0])[0]
        assert isinstance(code, int)
        return code, cri.text(answer, 1) + cri.text(answer, 2)

    def reason(self, container: str) -> str:
        """Why it does not run, as the kubelet is told."""
        status = cri.fields(self._ask("ContainerStatus", cri.message((1, container))))[1][0]
        assert isinstance(status, bytes)
        return cri.text(status, 11)

    def remove(self, pod: str) -> None:
        for method in ("StopPodSandbox", "RemovePodSandbox"):
            self._ask(method, cri.message((1, pod)))
        self.pods.remove(pod)

    def _ask(self, method: str, request: bytes) -> bytes:
        return cri.call(self.socket, f"RuntimeService/{method}", request)

    def stop(self) -> None:
        if self.process is None:
            return
        for pod in list(self.pods):
            self.remove(pod)
        for name in self("containers", "list", "--quiet").stdout.split():
            self("tasks", "rm", "--force", name, check=False)
            self("containers", "rm", name)
        engines.end(self.process, "containerd", 40)
        engines.unmount_below(self.base)
        self.process = None
