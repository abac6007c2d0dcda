"""Copies of the driver in places where no loader looks, in a root that may be big or hostile."""

import os
from pathlib import Path

import pytest

from cgpusched.driver import search as module
from cgpusched.driver.search import search


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def put(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def found(root: Path, *apart: str, **more: int) -> list[str]:
    return [str(folder) for folder in search(root, [Path(one) for one in apart], seconds=60, **more).folders]


def test_where_they_are(root: Path) -> None:
    put(root, "opt/app/lib/libcuda.so.1", "srv/x/libnvidia-ml.so.550.54.15", "libcuda.so", "opt/no/libcudart.so.12",
        "opt/no/libcuda.so.txt", "opt/no/libcuda.so.1.bak")
    (root / "opt/folder/libcuda.so.1").mkdir(parents=True)
    assert found(root) == ["/", "/srv/x", "/opt/app/lib"], "near the root first"


def test_links_are_not_followed_but_seen(root: Path, tmp_path: Path) -> None:
    put(root, "real/libcuda.so.1")
    put(tmp_path, "outside/libcuda.so.1")
    (root / "out").symlink_to(tmp_path / "outside")
    (root / "circle").symlink_to("/")
    (root / "named").mkdir()
    (root / "named/libcuda.so.1").symlink_to("/somewhere")
    assert found(root) == ["/named", "/real"]


def test_what_is_passed_over(root: Path) -> None:
    put(root, "proc/1/libcuda.so.1", "usr/share/x/libcuda.so.1", "usr/shared/libcuda.so.1")
    assert found(root) == ["/usr/shared"]


def test_of_what_is_mounted_the_usual_places_alone(root: Path) -> None:
    put(root, "data/lib64/libcuda.so.1", "data/deep/down/libcuda.so.1", "ours/lib/libcuda.so.1")
    (root / "link").symlink_to("/data")
    whole = search(root, [Path("/link"), Path("/ours/lib"), Path("/nothing")], [Path("/ours/lib")], seconds=60)
    assert [str(folder) for folder in whole.folders] == ["/data/lib64"]
    assert whole.whole


def test_near_the_root_first_and_not_for_ever(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(root, "a/b/c/d/libcuda.so.1", "z/libcuda.so.1")
    assert found(root, most=3) == ["/z"]
    for most in range(1, 6):
        assert not search(root, [], most=most, seconds=60).whole
    assert search(root, [], most=6, seconds=60).whole
    assert not search(root, [], seconds=0).whole
    monkeypatch.setattr(module, "ENTRIES_MAX", 10)
    put(root, *(f"many/{number}" for number in range(100)))
    assert "/z" in found(root)


def test_what_cannot_be_read(root: Path) -> None:
    put(root, "opt/libcuda.so.1")
    assert search(root / "none", []).folders == ()
    os.mkfifo(root / "fifo")
    assert found(root) == ["/opt"]
