"""Files below a container's root, whatever its owner puts in a folder's place."""

import os
from pathlib import Path

import pytest

from cgpusched.daemon.containers import places
from cgpusched.driver import cover, inside

FILE = Path("/etc/ld.so.preload")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / FILE.name).write_bytes(b"/the/nodes.so\n")
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root/etc").mkdir(parents=True)
    return tmp_path / "root"


def test_a_folder_that_is_a_link_to_the_nodes_files(root: Path, outside: Path) -> None:
    (root / "etc").rmdir()
    for link in (str(outside), "../" * 20 + str(outside)):
        (root / "etc").symlink_to(link)
        assert (root / "etc" / FILE.name).exists(), "where the node's root is the root"
        with pytest.raises(FileNotFoundError):
            inside.read(root, FILE, 100)
        (root / "etc").unlink()
    (root / "etc").symlink_to(outside)
    own = root / outside.relative_to("/")
    own.mkdir(parents=True)
    (own / FILE.name).write_bytes(b"/own.so\n")
    assert inside.read(root, FILE, 100) == b"/own.so\n" and inside.read(root, FILE, 4) == b"/own"


def test_a_folder_that_becomes_such_a_link_once_it_was_resolved(
    root: Path, outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolve = cover.resolve

    def swapped(root: Path, path: Path) -> Path | None:
        place = resolve(root, path)
        (root / "etc").rename(root / "was")
        (root / "etc").symlink_to(outside)
        return place

    (root / "etc" / FILE.name).write_bytes(b"/own.so\n")
    assert places._own_preload(root) == (FILE, b"/own.so\n")
    monkeypatch.setattr(cover, "resolve", swapped)
    assert places._own_preload(root) == (FILE, b"")


@pytest.mark.timeout(60)
def test_what_is_no_file_is_not_waited_for(root: Path) -> None:
    os.mkfifo(root / "etc" / FILE.name)
    with pytest.raises(OSError, match="Invalid argument"):
        inside.read(root, FILE, 100)
    assert places._own_preload(root) is None


def test_a_kernel_without_openat2(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read below a root; the node's own files are."""
    (root / "etc" / FILE.name).write_bytes(b"/own.so\n")
    monkeypatch.setattr(inside, "_SYS_OPENAT2", 1023)
    assert places._own_preload(root) is None
    assert inside.read(Path("/"), root / "etc" / FILE.name, 100) == b"/own.so\n"
