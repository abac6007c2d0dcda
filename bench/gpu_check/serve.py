"""cgpud without its tree, where FUSE or pyfuse3 is missing: takes cgpud's options.

The service is the real one; what it would mount are plain folders that hold ``version``, and nobody serves them. So
instances are made through the control socket, and what only the tree's files can do is not there.
"""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any


class Folder:
    """Stands where cgpufs.mount.Mount does, and where what serves one does."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, path: Path) -> "Folder":
        path.mkdir(parents=True, exist_ok=True)
        (path / "version").write_text("no tree\n")
        return cls(path)

    async def serve(self, *_: object, task_status: object = None, **__: object) -> None:
        import trio

        task_status.started()  # type: ignore[attr-defined]
        await trio.sleep_forever()

    def unmount(self) -> None:
        (self.path / "version").unlink(missing_ok=True)


class Nothing(types.ModuleType):
    """A module whose every name is an empty exception class: enough to be imported, raised and derived from."""

    def __getattr__(self, name: str) -> type:
        return type(name, (Exception,), {})


def main() -> int:
    if importlib.util.find_spec("pyfuse3") is None:
        sys.modules["pyfuse3"] = Nothing("pyfuse3")
    from cgpusched.daemon import main as cgpud
    from cgpusched.daemon import service

    async def mounted(stack: Any, kept: object, kind: str, path: Path, **_: object) -> object:
        folder = Folder.create(path)
        stack.callback(folder.unmount)
        return service._Mounted(folder, False)  # type: ignore[arg-type]

    parts = {"_mounted": mounted, "Session": Folder, "Operations": lambda tree: tree}
    for name, part in parts.items():
        setattr(service, name, part)
    return cgpud.main()


if __name__ == "__main__":
    sys.exit(main())
