"""``cgpuctl setup`` on real files: written, kept a copy of, undone, and shown without doing it."""

import dataclasses
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from node import BIN

from cgpusched.engines import setup
from cgpusched.errors import UserError


@pytest.fixture
def wish(tmp_path: Path) -> setup.Wish:
    return setup.Wish("docker", tmp_path / "docker/daemon.json", None, tmp_path / "bin/cgpu-runtime", tmp_path / "kept",
                      tmp_path / "docker.pid", hook=tmp_path / "nvidia-container-runtime-hook")


def test_written_twice_and_undone(wish: setup.Wish) -> None:
    assert wish.config
    wish.config.parent.mkdir()
    wish.config.write_text('{"debug": true}')
    wish.config.chmod(0o600)
    lines = setup.run(wish)
    assert f"{wish.config}: written" in lines
    assert json.loads(wish.config.read_text())["runtimes"]["cgpu"] == {"path": str(wish.binary)}
    assert wish.config.stat().st_mode & 0o7777 == 0o600
    assert wish.config.with_name("daemon.json.before-cgpu").read_text() == '{"debug": true}'
    assert wish.binary.stat().st_mode & 0o7777 == 0o755
    assert f"{wish.config}: nothing to change" in setup.run(wish)
    assert wish.config.with_name("daemon.json.before-cgpu").read_text() == '{"debug": true}'
    setup.run(dataclasses.replace(wish, undo=True))
    assert json.loads(wish.config.read_text()) == {"debug": True}
    assert not (wish.kept / "docker.json").exists()


def test_a_file_that_was_not_there_goes_again(wish: setup.Wish) -> None:
    assert wish.config
    setup.run(wish)
    assert wish.config.exists()
    assert setup.run(dataclasses.replace(wish, undo=True))[0] == f"{wish.config}: removed"
    assert not wish.config.exists()


def test_undone_where_nothing_was_done(wish: setup.Wish) -> None:
    assert setup.run(dataclasses.replace(wish, undo=True)) == [f"{wish.config}: nothing to change"]


def test_dry_run_shows_the_difference_and_writes_nothing(wish: setup.Wish, tmp_path: Path) -> None:
    lines = setup.run(dataclasses.replace(wish, dry_run=True))
    assert '+    "default-runtime": "cgpu"' in lines
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_followed_and_stays(wish: setup.Wish, tmp_path: Path) -> None:
    assert wish.config
    wish.config.parent.mkdir()
    real = tmp_path / "elsewhere.json"
    real.write_text("{}")
    wish.config.symlink_to(real)
    setup.run(wish)
    assert wish.config.is_symlink()
    assert "cgpu" in real.read_text()


def test_a_bad_file_is_named_and_left(wish: setup.Wish) -> None:
    assert wish.config
    wish.config.parent.mkdir()
    wish.config.write_text("{,}")
    with pytest.raises(UserError, match=f"{wish.config} is not JSON"):
        setup.run(wish)
    assert wish.config.read_text() == "{,}"
    assert not wish.binary.exists()


def test_docker_is_told(wish: setup.Wish, tmp_path: Path) -> None:
    program = tmp_path / "dockerd"
    # Python, since a shell cannot trap a hangup that the tests were started to ignore (nohup)
    program.write_text(f"""#!{sys.executable}
import signal, sys
signal.signal(signal.SIGHUP, lambda *_: (print("told", flush=True), sys.exit()))
print("ready", flush=True)
sys.stdin.read()
""")
    program.chmod(0o755)
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as docker:
        assert docker.stdout
        assert docker.stdout.readline() == "ready\n"
        assert wish.pid_file
        wish.pid_file.write_text(f"{docker.pid}\n")
        assert "Docker was told to read it again; containers go on" in setup.run(wish)
        assert docker.stdout.readline() == "told\n"


def test_nobody_else_is_told(wish: setup.Wish) -> None:
    with subprocess.Popen(["sleep", "100"]) as other:
        assert wish.pid_file
        wish.pid_file.write_text(f"{other.pid}\n")
        assert any("does not lead to Docker" in line for line in setup.run(wish))
        assert other.poll() is None
        other.send_signal(signal.SIGKILL)


def test_the_hook_that_docker_wants(wish: setup.Wish, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert any("Docker refuses --gpus" in line for line in setup.run(wish))
    assert not wish.hook.exists()
    setup.run(dataclasses.replace(wish, gpus_hook=True))
    assert subprocess.run([wish.hook, "prestart"], check=False).returncode == 0
    assert not any("--gpus" in line for line in setup.run(wish))
    setup.run(dataclasses.replace(wish, undo=True))
    assert not wish.hook.exists()


def test_a_hook_of_nvidias_stays(wish: setup.Wish, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    wish.hook.write_text("#!/bin/sh\n")
    wish.hook.chmod(0o755)
    setup.run(dataclasses.replace(wish, gpus_hook=True))
    setup.run(dataclasses.replace(wish, undo=True))
    assert wish.hook.read_text() == "#!/bin/sh\n"


def test_podmans_hook_is_written_and_removed(tmp_path: Path) -> None:
    file, binary, kept = tmp_path / "hooks.d/50-cgpu.json", tmp_path / "bin/cgpu-runtime", tmp_path / "kept"
    wish = setup.Wish("podman-hook", file, binary=binary, kept=kept)
    assert f"{file}: written" in setup.run(wish)
    assert json.loads(file.read_text())["hook"] == {"path": str(binary), "args": ["cgpu-runtime", "precreate"]}
    assert binary.exists()
    assert setup.run(dataclasses.replace(wish, undo=True))[0] == f"{file}: removed"


@pytest.mark.parametrize("engine", ["docker", "containerd"])
def test_the_hook_is_podmans(engine: str) -> None:
    done = subprocess.run([BIN / "cgpuctl", "setup", engine, "--hook", "--dry-run"], capture_output=True, text=True,
                          check=False)
    assert done.returncode == 1
    assert f"--hook is podman's: {engine} knows no such hooks" in done.stderr
