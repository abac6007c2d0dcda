"""What a container gets, and where on the node that lies."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from cgpusched import files
from cgpusched.containers import spec
from cgpusched.containers.variables import Ask
from cgpusched.driver import cover
from cgpusched.driver.names import CUDA, NVML, REAL, Driver
from cgpusched.engines.setup import install_runtime
from cgpusched.errors import UserError

INSIDE = "/usr/local/cgpu"
"""Where a container has what is ours; csrc/client knows its ``sock``, csrc/sim its ``sim``."""
TREE = "/run/cgpu"
"""Where it has its view, wherever the node's tree is mounted."""
LOADERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/usr/lib")
"""Where the loader looks without being told: Debian's way, Red Hat's, and the rest."""


@dataclass(frozen=True)
class Places:
    """Paths on the node."""

    runtime: Path
    """Has a folder an instance, the views, and ``ct/``: an empty file for each container that is registered."""
    lib: Path
    """The hook and the proxies."""
    driver: Driver
    """The libraries behind the proxies."""
    tree: Path
    """The node's own, with all instances."""
    binary: Path
    """cgpu-runtime, as engines' configurations name it."""
    runtimes: tuple[str, ...]
    """What it goes on with: the first that there is."""
    sim: Path | None = None
    """State of the simulated device."""

    @property
    def view(self) -> Path:
        """Mount point of the views."""
        return self.runtime / "view"

    @property
    def real(self) -> Path:
        """Empty files for the real libraries to be mounted on: at their place in ``lib`` there are links."""
        return self.runtime / REAL

    def mark(self, ident: str) -> Path:
        return self.runtime / "ct" / ident

    def mounts(self, ident: str) -> tuple[spec.Mount, ...]:
        """What a container gets, in this order."""
        lib = f"{INSIDE}/lib"
        sim = [spec.Mount(str(self.sim), f"{INSIDE}/sim", writable=True)] if self.sim else []
        return (
            spec.Mount(str(self.lib), lib, executable=True),
            spec.Mount(str(self.real), f"{lib}/{REAL}", executable=True),
            spec.Mount(str(self.driver.cuda), f"{lib}/{REAL}/{CUDA}", executable=True),
            spec.Mount(str(self.driver.nvml), f"{lib}/{REAL}/{NVML}", executable=True),
            spec.Mount(str(self.runtime / "inst" / ident), f"{INSIDE}/sock"),
            *sim,
            spec.Mount(str(self.view / ident), TREE),
        )

    def covers(self, root: Path, folders: Iterable[str]) -> list[cover.Bind]:
        """The proxies over all the driver libraries below ``root``, and where the loader looks if there were none.

        ``folders``: more to look through, as the container names them. Blocks for as long as reading them takes.
        """
        place = Path(INSIDE, "lib")
        real = place / REAL  # a mount of its own: see mounts()
        found = [bind for bind in cover.plan(self.lib, self.driver, place, root, tuple(map(Path, folders)))
                 if bind.target.parent != real]
        usual = [resolved for folder in LOADERS if (resolved := cover.resolve(root, Path(folder)))]
        usual = usual or [Path(LOADERS[0])]  # links in circles: the hook says so
        for name in (CUDA, NVML):
            if not any(bind.source == self.lib / name and bind.target.parent in usual for bind in found):
                folder = next((one for one in usual if (root / one.relative_to("/")).is_dir()), usual[0])
                # an image made from a container with a driver has a link there that leads nowhere
                target = cover.resolve(root, folder / name) or folder / name
                found.append(cover.Bind(self.lib / name, target))
        return found

    def edit(self, ident: str, asked: Ask) -> spec.Edit:
        view = str(self.view / ident)
        return spec.Edit(self.mounts(ident), asked.visible, str(self.binary), str(self.tree), view)

    def missing(self, ident: str, config: spec.Spec) -> list[spec.Mount]:
        """What a configuration without that edit needs to be mounted by the hook."""
        own = self.mounts(ident)
        by_hand = spec.views_by_hand(config, str(self.tree), str(self.view / ident))
        places = {mount.target for mount in own}
        return [*spec.missing(config, own), *(mount for mount in by_hand if mount.target not in places)]

    @property
    def socket(self) -> Path:
        """Where cgpu-runtime asks."""
        return self.runtime / "runtime.sock"

    def prepare(self, known: Collection[str] = ()) -> None:
        """Makes the folders, without what a predecessor left in them, and cgpu-runtime. UserError: it cannot be done.

        The marks of containers that are ``known`` stay.

        Blocks.
        """
        try:
            for folder, mode in ((self.runtime / "ct", 0o755), (self.real, 0o755)):
                files.own_folder(folder, mode)
            for mark in (self.runtime / "ct").iterdir():
                if mark.name not in known:
                    mark.unlink()
            for name in (CUDA, NVML):
                files.replace(self.real / name, b"", 0o644)
            install_runtime(self.binary)
            lines = [f"socket {self.socket}", *(f"runtime {one}" for one in self.runtimes)]
            files.replace(self.binary.with_name(f"{self.binary.name}.conf"), "\n".join([*lines, ""]).encode(), 0o644)
        except OSError as error:
            raise UserError(f"{error.filename or self.runtime}: cannot be used: {error.strerror}") from None
