"""cgpu-runtime as an engine calls it: what goes on untouched, what is asked, what is refused, and in whose words."""

import json
import os
import re
import time
from pathlib import Path

import pytest
from oci import CREATE, DELETE, HOOK, Bench, StandIn

from cgpusched.driver.find import packaged

ASKS = "ALIYUN_COM_GPU_MEM_CONTAINER=6"


def test_a_plain_container_goes_on_without_the_daemon(bench: Bench) -> None:
    before = bench.spec("NVIDIA_VISIBLE_DEVICES=all")
    done = bench.create()
    assert done.returncode == 7
    assert bench.went_on() == ["--log", str(bench.log), "--log-format", "json", "create", "--bundle", str(bench.bundle),
                               "--pid-file", str(bench.base / "pid"), "c1"]
    assert (bench.bundle / "config.json").read_text() == before


@pytest.mark.parametrize("arguments", [["--version"], ["state", "c1"], ["start", "c1"], ["kill", "c1", "9"], ["list"],
                                       ["exec", "--process", "p", "c1"], ["--root", "create", "list"]])
def test_what_makes_no_container_goes_on_as_it_is(bench: Bench, daemon: StandIn, arguments: list[str]) -> None:
    bench.spec(ASKS)
    assert bench(*arguments).returncode == 7
    assert bench.went_on() == arguments
    assert daemon.asked == []


def test_the_daemons_configuration_takes_the_place_of_the_old(bench: Bench, daemon: StandIn) -> None:
    old = bench.spec(ASKS)
    config = bench.bundle / "config.json"
    config.chmod(0o640)
    os.chown(config, 12, 34)
    daemon.status, daemon.spec = 1, b'{"new": "' + b"x" * 200_000 + b'"}'
    assert bench.create("an-id").returncode == 7
    assert daemon.asked == [(CREATE, f"an-id\0{bench.bundle}\0".encode(), old)]
    assert config.read_bytes() == daemon.spec
    state = config.stat()
    assert (state.st_mode & 0o7777, state.st_uid, state.st_gid) == (0o640, 12, 34)
    assert os.listdir(bench.bundle) == ["config.json"]


@pytest.mark.parametrize("form", [["create", "-b", "{bundle}", "c2"], ["create", "--bundle={bundle}", "--", "c2"],
                                  ["--root", "/r", "run", "--bundle", "{bundle}", "--no-pivot", "c2"],
                                  ["--systemd-cgroup", "--log=/dev/null", "create", "--console-socket", "s", "--bundle",
                                   "{bundle}", "c2"]])
def test_every_way_to_name_bundle_and_id(bench: Bench, daemon: StandIn, form: list[str]) -> None:
    bench.spec(ASKS)
    assert bench(*(word.format(bundle=bench.bundle) for word in form)).returncode == 7
    assert [(kind, payload) for kind, payload, _ in daemon.asked] == [(CREATE, f"c2\0{bench.bundle}\0".encode())]


def test_the_current_folder_is_the_bundle_unless_one_is_named(bench: Bench, daemon: StandIn) -> None:
    (bench.base / "config.json").write_text(bench.spec(ASKS))
    assert bench("run", "c3").returncode == 7
    assert daemon.asked[0][1] == f"c3\0{bench.base}\0".encode()


def test_nothing_of_ours_after_all_leaves_the_configuration(bench: Bench, daemon: StandIn) -> None:
    before = bench.spec("CGPU_DISABLE=true", ASKS)
    assert bench.create().returncode == 7
    assert (bench.bundle / "config.json").read_text() == before


def test_a_refusal_is_the_engines_error(bench: Bench, daemon: StandIn) -> None:
    before = bench.spec(ASKS)
    daemon.status, daemon.text = -22, 'ALIYUN_COM_GPU_MEM_CONTAINER="ä\t\\": a number of GiB'
    done = bench.create()
    assert done.returncode == 1
    assert bench.went_on() is None
    assert done.stderr == f"cgpu: {daemon.text}\n"
    entry = bench.logged()
    assert (entry["level"], entry["msg"]) == ("error", f"cgpu: {daemon.text}")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", entry["time"])
    assert (bench.bundle / "config.json").read_text() == before


def test_who_asks_does_not_start_without_a_daemon(bench: Bench) -> None:
    bench.spec(ASKS)
    assert bench.create().returncode == 1
    assert bench.went_on() is None
    assert bench.logged()["msg"] == (f"cgpu: c1 asks for a share of a GPU, and cgpud cannot be asked: {bench.socket}: "
                                     "No such file or directory")


def test_nor_with_one_that_closes_the_connection(bench: Bench) -> None:
    bench.spec(ASKS)
    bench.socket.write_text("no socket")
    assert bench.create().returncode == 1
    assert "Connection refused" in bench.logged()["msg"]


def test_a_missing_bundle_is_the_next_runtimes_to_tell(bench: Bench, daemon: StandIn) -> None:
    assert bench("create", "--bundle", "/no/such/folder", "c1").returncode == 7
    assert daemon.asked == []


def test_delete_tells_the_daemon_of_what_it_knows_only(bench: Bench, daemon: StandIn) -> None:
    (bench.run_dir / "ct" / "known").touch()
    for ident in ("unknown", "known", "../ct/known"):
        assert bench("delete", "--force", ident).returncode == 7
        assert bench.went_on() == ["delete", "--force", ident]
    assert [(kind, payload) for kind, payload, _ in daemon.asked] == [(DELETE, b"known\0")]


def test_delete_goes_on_without_the_daemon(bench: Bench) -> None:
    (bench.run_dir / "ct" / "known").touch()
    assert bench("delete", "known").returncode == 7


def test_the_first_runtime_that_is_there_is_the_next(bench: Bench) -> None:
    bench.configure("no-such-runtime", "/no/such/runtime", bench.next, "true")
    bench.spec()
    assert bench.create().returncode == 7


def test_a_name_is_looked_for_on_the_path(bench: Bench) -> None:
    bench.configure("next")
    bench.spec()
    assert bench.create(PATH=f"/no/such:{bench.base}").returncode == 7


def test_without_any_runtime_it_says_so(bench: Bench) -> None:
    bench.configure("one", "two")
    bench.spec()
    assert bench.create().returncode == 1
    assert bench.logged()["msg"] == "cgpu: no runtime to go on with: none of one, two is there"


def test_it_never_takes_itself_for_the_next(bench: Bench) -> None:
    link = bench.base / "runc"
    link.symlink_to(bench.program)
    bench.configure(bench.program, link, bench.next)
    bench.spec()
    assert bench.create().returncode == 7


def test_a_longer_loop_ends(bench: Bench) -> None:
    between = bench._script(bench.base / "between", f'exec {bench.program} "$@"')
    bench.configure(between)
    bench.spec()
    assert bench.create().returncode == 1
    assert "a loop of runtimes" in bench.logged()["msg"]


def test_without_a_configuration_the_usual_runtimes_are_looked_for(bench: Bench) -> None:
    Path(f"{bench.program}.conf").unlink()
    for name in ("crun", "runc"):
        os.link(bench.next, bench.base / name)
    bench.spec()
    assert bench.create(PATH=f"{bench.base}").returncode == 7
    done = bench("--version", PATH="/nowhere")
    assert done.stderr.strip().endswith("none of nvidia-container-runtime, runc, crun is there")


def test_a_hook_tells_the_daemon_the_state(bench: Bench, daemon: StandIn) -> None:
    state = json.dumps({"id": "c1", "pid": os.getpid(), "bundle": str(bench.bundle)})
    assert bench("hook", stdin=state).returncode == 0
    assert daemon.asked == [(HOOK, state.encode(), "")]
    assert bench.went_on() is None


def test_a_hook_that_is_refused_fails(bench: Bench, daemon: StandIn) -> None:
    daemon.status, daemon.text = -3, "no such container"
    done = bench("hook", stdin="{}")
    assert (done.returncode, done.stderr) == (1, "cgpu: no such container\n")


def test_a_silent_daemon_is_not_waited_for_at_the_end(bench: Bench, daemon: StandIn) -> None:
    (bench.run_dir / "ct" / "known").touch()
    daemon.silent = True
    begin = time.monotonic()
    assert bench("delete", "known").returncode == 7
    assert time.monotonic() - begin < 30  # a hang would be for ever
    assert daemon.asked


def test_the_program_needs_no_new_glibc() -> None:
    """It runs in the node's root, where a build for Debian 12 runs on what is as new; nothing but libc is needed."""
    text = packaged("bin/cgpu-runtime").read_bytes()
    assert b"libc.so.6\0" in text
    assert b"libpthread" not in text
    assert b"libdl" not in text
