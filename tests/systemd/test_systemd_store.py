"""What systemd's descriptor store is told: it takes a second file of one name beside the first."""

import os
from collections.abc import Iterator

import pytest

from cgpusched.daemon.survival.kept import Kept


class Store:
    """As systemd's: a set of files, each with a name."""

    def __init__(self) -> None:
        self.held: set[tuple[str, int]] = set()

    def put(self, name: str, fd: int) -> None:
        self.held.add((name, os.fstat(fd).st_ino))

    def drop(self, name: str) -> None:
        self.held = {one for one in self.held if one[0] != name}

    def end(self) -> None:
        pass


@pytest.fixture
def store() -> Store:
    return Store()


def memfd(content: bytes) -> int:
    fd = os.memfd_create("init", os.MFD_CLOEXEC)
    os.pwrite(fd, content, 0)
    return fd


@pytest.fixture
def found(store: Store) -> Iterator[dict[str, int]]:
    """What a predecessor left: the store has the same."""
    left = {"tree-init.0-45": memfd(b"init")}
    for name, fd in left.items():
        store.put(name, fd)
    yield left


@pytest.mark.parametrize("content", [b"init", b"another"])
def test_what_was_taken_is_kept_once(store: Store, found: dict[str, int], content: bytes) -> None:
    before = set(store.held)
    kept = Kept(found, store)
    assert kept.take_bytes("tree-init", "0-45") == b"init"
    kept.keep_bytes("tree-init", "0-45", content)
    kept.ready()
    assert [name for name, _ in store.held] == ["tree-init.0-45"]
    assert (store.held == before) == (content == b"init")
    kept.close()


def test_what_was_taken_and_not_used_goes_when_another_comes(store: Store, found: dict[str, int]) -> None:
    kept = Kept(found, store)
    kept.take_bytes("tree-init", "0-45")
    kept.keep_bytes("tree-init", "0-50", b"new")
    kept.ready()
    assert [name for name, _ in store.held] == ["tree-init.0-50"]
    kept.close()
