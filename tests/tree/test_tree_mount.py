"""A mounted tree, used by the programs that people use: listings, reads, every way to write, every refusal."""

import contextlib
import errno
import os
import re
import shutil
import stat
import subprocess
import tarfile
from pathlib import Path

import oracle
import pytest
from mounted import Served, detach
from tree_server import CONTAINER, GIB

from cgpufs.mount import Mount, mount_points
from cgpusched.errors import UserError

NOBODY = 65534


def sh(script: str, tree: Path, shell: str = "sh", user: int | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [shell, "-c", script], cwd=tree, capture_output=True, text=True, timeout=30, user=user,
        env={**os.environ, "LC_ALL": "C"},
    )  # fmt: skip


def test_listing(tree: Path) -> None:
    for path, entries in oracle.listings().items():
        assert sorted(os.listdir(tree / path.strip("/"))) == sorted(entries)
    found = sorted(str(path.relative_to(tree)) for path in tree.rglob("*"))
    expected = sorted(f"{path}/{name}".lstrip("/") for path, names in oracle.listings().items() for name in names)
    assert found == expected


def test_modes_and_formats(tree: Path) -> None:
    for row in oracle.nodes():
        for path in oracle.paths(row["node"]):
            status = os.stat(tree / path)
            assert stat.S_IMODE(status.st_mode) == int(row["mode"], 8)
            assert (status.st_uid, status.st_gid) == (0, 0)
            text = (tree / path).read_text()
            assert re.fullmatch(row["format"], text)
            assert status.st_size == len(text)
    for path in oracle.listings():
        assert stat.S_IMODE(os.stat(tree / path.strip("/")).st_mode) == 0o555


def test_mount_point(tree: Path) -> None:
    (line,) = [line.split() for line in open("/proc/self/mounts") if line.split()[1] == str(tree)]
    assert line[0] == "cgpu" and line[2] == "fuse.cgpufs"
    assert {"nosuid", "nodev", "noexec", "default_permissions", "allow_other"} <= set(line[3].split(","))
    assert os.statvfs(tree).f_namemax == 255


@pytest.mark.parametrize("path", oracle.writable())
def test_malformed(tree: Path, served: Served, path: str) -> None:
    before = (tree / path).read_bytes()
    served.ask("log")
    for what, data in oracle.malformed():
        fd = os.open(tree / path, os.O_WRONLY | os.O_TRUNC)
        try:
            with pytest.raises(OSError) as caught:
                os.write(fd, data)
        finally:
            os.close(fd)
        assert caught.value.errno == errno.EINVAL, what
        assert (tree / path).read_bytes() == before, what
        (line,) = served.ask("log")
        assert f"node={path}" in line
    assert served.ask("commands") == []


def test_refused(tree: Path) -> None:
    for path, text, error in [*oracle.refused(), *(("inst_ctl", *row) for row in oracle.refused_commands())]:
        before = (tree / path).read_bytes()
        with pytest.raises(OSError) as caught, open(tree / path, "w") as file:
            file.write(text + "\n")
        assert errno.errorcode[caught.value.errno] == error, (path, text)
        assert (tree / path).read_bytes() == before


WAYS = {
    "echo": "echo {} > {}",
    "append": "echo {} >> {}",
    "printf": "printf %s {} > {}",
    "no clobber": "exec 3<>{1}; echo {0} >&3",
    "twice on one descriptor": "exec 3>{1}; echo 1 >&3; echo {0} >&3",
    "tee": "echo {} | tee {}",
    "tee -a": "echo {} | tee -a {}",
    "cp": "echo {} > $TMP/value; cp $TMP/value {}",
    "cat": "echo {} > $TMP/value; cat $TMP/value > {}",
    "dd": "echo {} | dd of={} status=none",
    "dd conv": "echo {} | dd of={} bs=1M conv=fsync,notrunc oflag=append status=none",
    "python": "python3 -c \"with open('{1}', 'w') as f: f.write('{0}\\n')\"",
    "python print": "python3 -c \"print({}, file=open('{}', 'r+'), flush=True)\"",
    "truncate first": "truncate -s 0 {1} && echo {0} > {1}",
}


@pytest.mark.parametrize("shell", [name for name in ("bash", "dash", "busybox") if shutil.which(name)])
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_write(tree: Path, tmp_path: Path, shell: str, way: str) -> None:
    def run(value: str) -> subprocess.CompletedProcess[str]:
        script = f"TMP={tmp_path}; " + WAYS[way].format(value, "0/policy")
        return sh(
            ("busybox sh -c " if shell == "busybox" else "") + script, tree, "sh" if shell == "busybox" else shell
        )

    for value in ("3", "5"):
        assert run(value).returncode == 0
        assert (tree / "0/policy").read_text() == value + "\n"
    result = run("9")
    assert result.returncode != 0, result
    assert "nvalid argument" in result.stderr or "I/O error" in result.stderr, result
    assert (tree / "0/policy").read_text() == ("1\n" if way.startswith("twice") else "5\n")


def test_nothing_written_changes_nothing(tree: Path) -> None:
    assert (
        sh(": > 0/policy && truncate -s 0 0/policy && truncate -s 99 0/policy && touch 0/policy", tree).returncode == 0
    )
    assert (tree / "0/policy").read_text() == "2\n"


WAYS_TO_READ = [
    "cat {}",
    "head -c 100 {}",
    "tail -n +1 {}",
    "tail -c 100 {}",
    "grep '' {}",
    "sed '' {}",
    "awk 1 {}",
    "dd if={} status=none",
    "dd if={} bs=1 status=none",
    "read x < {}; echo $x",
    "echo $(cat {})",
    "cp {} $TMP/c && cat $TMP/c",
    "cat < {} | cat",
    "wc -c < {} >/dev/null && cat {}",
    "tar cf - {} | tar xOf -",
    'while c=$(head -c1; echo x) && [ "$c" != x ]; do printf %s "${{c%x}}"; done < {}',
    "python3 -c \"import sys; sys.stdout.write(open('{}').read())\"",
]


@pytest.mark.parametrize("way", WAYS_TO_READ)
def test_ways_to_read(tree: Path, tmp_path: Path, way: str) -> None:
    for path in ("0/c0ffee00c0ff/id", "0/policy", "0/c0ffee00c0ff/memsize"):
        result = sh(f"TMP={tmp_path}; " + way.format(path, path), tree, "bash")
        assert (result.returncode, result.stdout) == (0, (tree / path).read_text()), result


def test_sendfile(tree: Path, tmp_path: Path) -> None:
    for value in ("9", "13", "8"):  # also longer and shorter than what the page cache last saw
        (tree / "0/max_inst").write_text(value)
        shutil.copyfile(tree / "0/max_inst", tmp_path / "copy")
        assert (tmp_path / "copy").read_text() == value + "\n"


def test_tar(tree: Path, tmp_path: Path) -> None:
    result = sh(f"tar cf {tmp_path}/t.tar .", tree)
    assert (result.returncode, result.stderr) == (0, "")
    with tarfile.open(tmp_path / "t.tar") as archive:
        member = archive.extractfile("./0/c0ffee00c0ff/id")
        assert member is not None and member.read().decode() == CONTAINER + "\n"


@pytest.mark.parametrize("script", [
    "sed -i s/2/3/ 0/policy", "rm -f 0/policy", "mv 0/policy 0/other", "mkdir 0/new", "rmdir 0/bare-1", "ln -s a b",
    "ln 0/policy c", "mknod p p", "touch new", "echo 1 > new", "chmod 666 0/policy", "chown 1 0/policy",
    "echo 1 > version", "echo 1 >> 0/free_weight", "truncate -s 0 version", "touch version",
    "cp version 0/c0ffee00c0ff/id",
])  # fmt: skip
def test_refused_cleanly(tree: Path, script: str) -> None:
    result = sh(script, tree, "bash")
    assert result.returncode != 0
    assert re.search("not permitted|denied", result.stderr), result
    assert (tree / "0/policy").read_text() == "2\n"
    assert sorted(os.listdir(tree)) == oracle.listings()["/"]


def test_extended_attributes(tree: Path) -> None:
    path = tree / "0/policy"
    for call, code in ((lambda: os.setxattr(path, "user.x", b"1"), errno.EPERM),
                       (lambda: os.getxattr(path, "user.x"), errno.EOPNOTSUPP),
                       (lambda: os.listxattr(path), errno.EOPNOTSUPP)):  # fmt: skip
        with pytest.raises(OSError) as caught:
            call()
        assert caught.value.errno == code


def test_other_users(tree: Path, tmp_path: Path) -> None:
    for folder in [tmp_path, *tmp_path.parents]:
        if not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    readable = [row for row in oracle.nodes() if int(row["mode"], 8) & 0o004]
    script = "; ".join(f"cat {oracle.paths(row['node'])[0]} >/dev/null || exit 1" for row in readable)
    assert sh(script, tree, user=NOBODY).returncode == 0
    for refused in (
        "cat inst_ctl",
        "cat upgrade",
        "echo 3 > 0/policy",
        "echo 0 > 0/c0ffee00c0ff/weight",
        "echo 1 > upgrade",
    ):
        result = sh(refused, tree, user=NOBODY)
        assert result.returncode != 0 and "denied" in result.stderr
    assert (tree / "0/policy").read_text() == "2\n"


def test_instances_come_and_go(tree: Path) -> None:
    def control(line: str) -> None:
        (tree / "inst_ctl").write_text(line)

    control("create dead0000beef-long-name gpu=1 memsize=1GiB highprio=1\n")
    directory = tree / "1/dead0000beef"
    assert sorted(os.listdir(directory)) == oracle.listings()["/1/bare-1"]
    assert (directory / "memsize").read_text() == f"{GIB}\n"
    with open(directory / "weight") as held, open(directory / "weight", "w") as writer:
        assert held.read() == "1\n"
        control("destroy dead0000beef-long-name")
        assert not directory.exists()  # at once, whatever the kernel has cached
        assert not (directory / "weight").exists()
        assert os.listdir(tree / "1") and "dead0000beef" not in os.listdir(tree / "1")
        with pytest.raises(FileNotFoundError):
            os.pread(held.fileno(), 9, 0)
        with pytest.raises(FileNotFoundError):
            os.write(writer.fileno(), b"1")
        control("create dead0000beef-other gpu=1 memsize=1GiB")
        with pytest.raises(FileNotFoundError):
            os.pread(held.fileno(), 9, 0)
        assert (directory / "id").read_text() == "dead0000beef-other\n"
        control("destroy dead0000beef-other")
        control("create dead0000beef-long-name gpu=1 memsize=1GiB weight=3")
        assert os.pread(held.fileno(), 9, 0) == b"3\n"


def test_a_working_directory_outlives_its_instance(tree: Path) -> None:
    script = "cd 1/bare-1 && echo destroy bare-1 > ../../inst_ctl && cat id; cd ../..; cat version"
    result = sh(script, tree, "bash")
    assert "No such file" in result.stderr and result.stdout.endswith("1.2.3\n")


def test_a_full_listing(tree: Path) -> None:
    """More entries than one request holds."""
    (tree / "1/max_inst").write_text("25")
    for i in range(24):
        (tree / "inst_ctl").write_text(f"create i{i:011}{'x' * 100} gpu=1 memsize=1M weight=1")
    names = os.listdir(tree / "1")
    assert sorted(names) == sorted([*oracle.listings()["/1"], *(f"i{i:011}" for i in range(24))])


def test_a_stale_mount_is_replaced(serve, mountpoint: Path) -> None:
    dead = serve().wait_ready()
    dead.kill()
    with pytest.raises(OSError) as caught:
        os.listdir(mountpoint)
    assert caught.value.errno == errno.ENOTCONN
    assert sorted(os.listdir(serve().wait_ready().path)) == oracle.listings()["/"]
    assert [point.path for point in mount_points()].count(str(mountpoint)) == 1


def test_a_living_daemons_tree_is_left_alone(serve, mountpoint: Path) -> None:
    first = serve().wait_ready()
    for path in (mountpoint, mountpoint.parent / "." / mountpoint.name):
        with pytest.raises(UserError, match="another cgpud serves its tree there"):
            Mount.create(path)
    assert (mountpoint / "version").read_text() == "1.2.3\n" and first.process.poll() is None
    assert [point.path for point in mount_points()].count(str(mountpoint)) == 1


def test_a_tree_that_is_kept_and_not_served_is_replaced(mountpoint: Path) -> None:
    kept = Mount.create(mountpoint)  # whoever looks at it waits
    try:
        fresh = Mount.create(mountpoint)
        assert [point.path for point in mount_points()].count(str(mountpoint)) == 1
        fresh.unmount()
    finally:
        kept.close()
    assert str(mountpoint) not in [point.path for point in mount_points()]


def test_what_somebody_else_mounted_is_not_hidden(mountpoint: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "other", mountpoint], check=True)
    (mountpoint / "precious").write_text("")
    with pytest.raises(UserError, match=r"something else is mounted there \(type tmpfs\)"):
        Mount.create(mountpoint)
    assert os.listdir(mountpoint) == ["precious"]


def test_stopping_unmounts(serve, mountpoint: Path) -> None:
    server = serve().wait_ready()
    held = os.open(mountpoint / "0/policy", os.O_RDONLY)  # does not keep it
    assert server.stop() == 0
    with pytest.raises(OSError):
        os.read(held, 9)
    with contextlib.suppress(OSError):
        os.close(held)
    assert str(mountpoint) not in [point.path for point in mount_points()]
    assert not mountpoint.exists()  # a script that writes to the tree fails now, and leaves no file behind


def test_unmounted_by_somebody_else(serve, mountpoint: Path) -> None:
    server = serve().wait_ready()
    detach(mountpoint)
    assert server.process.wait(10) != 0  # says so (Unmounted) instead of serving nobody


def test_the_mount_point_is_made(serve, mountpoint: Path) -> None:
    path = mountpoint / "a b" / "c"
    server = serve(path=path).wait_ready()
    assert (path / "version").read_text() == "1.2.3\n"
    assert server.stop() == 0
    assert not path.exists()


def test_what_cannot_be_mounted(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    for path in ("file", "file/below", "link"):
        with pytest.raises(UserError, match=f"^cannot mount the tree on {tmp_path}/{path}: [^\n]+$"):
            Mount.create(tmp_path / path)


def test_a_container_view(serve, mountpoint: Path) -> None:
    serve("--view-only", "bare-1").wait_ready()
    assert sorted(os.listdir(mountpoint / "0")) == [
        "bare-1",
        "free_weight",
        "major",
        "max_inst",
        "policy",
        "prio_ratio",
    ]
    assert not (mountpoint / "0/c0ffee00c0ff").exists()
    assert CONTAINER not in (mountpoint / "inst_ctl").read_text()
    for script in (
        "echo 3 > 0/policy",
        "touch 0/policy",
        "truncate -s 0 0/policy",
        "rm 0/policy",
        "mkdir x",
        "echo 1 > version",
    ):
        result = sh(script, mountpoint, "bash")
        assert result.returncode != 0 and re.search("Read-only file system", result.stderr), result
