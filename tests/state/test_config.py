"""The configuration: defaults, file, flags over it, and every mistake named."""

import argparse
from pathlib import Path

import pytest

from cgpusched import config
from cgpusched.config import Config, ControlConfig, parse_simulate
from cgpusched.errors import UserError
from cgpusched.model import GpuSettings, Policy

GIB = 1 << 30


def flags(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    return parser.parse_args(arguments)


def load(tmp_path: Path, text: str, *arguments: str) -> Config:
    path = tmp_path / "config.toml"
    path.write_text(text)
    return config.load(path, flags(*arguments))


FULL = """
mount = "/tree"
runtime_dir = "/sockets"
lib_dir = "/libs"
driver_dir = "/driver"
simulate = "4x23028MiB"
log_level = "debug"
policy = 3
max_inst = 10
prio_ratio = 50
default_memsize = "2GiB"
overcommit = true

[gpu.1]
policy = 0

[control]
group = "gpuusers"
max_memsize = "8GiB"
max_weight = 4
highprio = true
max_instances = 3
"""


def test_defaults(tmp_path: Path) -> None:
    loaded = load(tmp_path, "")
    assert (loaded.mount, loaded.runtime_dir) == (Path("/run/cgpu"), Path("/run/cgpud"))
    assert (loaded.lib_dir, loaded.driver_dir) == (Path("/var/lib/cgpud/lib"), None)
    assert (loaded.simulate, loaded.log_level, loaded.default_memsize, loaded.overcommit) == (None, "info", 0, False)
    assert loaded.control == ControlConfig("", None, None, False, None)
    assert loaded.settings([0, 1]) == {0: GpuSettings(), 1: GpuSettings()}


def test_everything(tmp_path: Path) -> None:
    loaded = load(tmp_path, FULL)
    assert (loaded.mount, loaded.runtime_dir) == (Path("/tree"), Path("/sockets"))
    assert (loaded.lib_dir, loaded.driver_dir) == (Path("/libs"), Path("/driver"))
    assert loaded.simulate == (23028 << 20,) * 4
    assert (loaded.log_level, loaded.default_memsize, loaded.overcommit) == ("debug", 2 * GIB, True)
    assert loaded.control == ControlConfig("gpuusers", 8 * GIB, 4, True, 3)
    assert loaded.settings(range(2)) == {0: GpuSettings(Policy.FIXED, 10, 50), 1: GpuSettings(Policy.FAIR, 10, 50)}
    assert loaded.source == str(tmp_path / "config.toml")


def test_flags_override(tmp_path: Path) -> None:
    loaded = load(
        tmp_path, FULL,
        "--mount", "/m", "--runtime-dir", "/r", "--lib-dir", "/l", "--driver-dir", "/d", "--simulate", "off",
        "--log-level", "error", "--policy", "5", "--max-inst", "25", "--prio-ratio", "99", "--default-memsize", "7",
        "--no-overcommit", "--group", "others",
    )  # fmt: skip
    assert (loaded.mount, loaded.runtime_dir, loaded.lib_dir, loaded.driver_dir) == tuple(
        map(Path, "/m /r /l /d".split())
    )
    assert (loaded.simulate, loaded.log_level, loaded.default_memsize, loaded.overcommit) == ((), "error", 7, False)
    assert loaded.settings([0, 1]) == {gpu: GpuSettings(Policy.NATIVE, 25, 99) for gpu in (0, 1)}
    assert (loaded.control.group, loaded.control.max_weight) == ("others", 4)


def test_runtime_for_engines(tmp_path: Path) -> None:
    assert load(tmp_path, "").binary == Path("/var/lib/cgpud/bin/cgpu-runtime")
    assert load(tmp_path, "").runtimes == ("nvidia-container-runtime", "runc", "crun")
    loaded = load(tmp_path, "lib_dir = '/opt/x/lib'\nruntimes = ['/usr/bin/crun', 'runc']")
    assert (loaded.binary, loaded.runtimes) == (Path("/opt/x/bin/cgpu-runtime"), ("/usr/bin/crun", "runc"))
    assert load(tmp_path, "bin_dir = '/b'", "--bin-dir", "/c").binary == Path("/c/cgpu-runtime")


def test_whether_containers_may_disable_it(tmp_path: Path) -> None:
    assert not load(tmp_path, "").ignore_disable and load(tmp_path, "ignore_disable = true").ignore_disable
    with pytest.raises(config.ConfigError, match="ignore_disable = 1: true or false"):
        load(tmp_path, "ignore_disable = 1")


def test_flags_of_others_are_left_alone(tmp_path: Path) -> None:
    namespace = flags("--policy", "2")
    namespace.verbose = True
    assert config.load(_empty(tmp_path), namespace).boot.policy == 2


def _empty(tmp_path: Path) -> Path:
    path = tmp_path / "empty.toml"
    path.touch()
    return path


def test_the_default_file_may_be_missing_but_a_named_one_may_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "DEFAULT_PATH", tmp_path / "absent.toml")
    assert config.load(None, flags()).mount == Path("/run/cgpu")
    with pytest.raises(UserError, match=r"absent.toml: no such file"):
        config.load(tmp_path / "absent.toml", flags())
    with pytest.raises(UserError, match=r"absent.toml: no such file"):
        config.load(None, flags("--config", str(tmp_path / "absent.toml")))


def test_the_default_file_is_read_if_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "DEFAULT_PATH", tmp_path / "config.toml")
    (tmp_path / "config.toml").write_text("policy = 4")
    assert config.load(None, flags()).settings([0])[0].policy == Policy.SOFT


def test_unreadable(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Is a directory"):
        config.load(tmp_path, flags())
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="binary.toml: not TOML"):
        config.load(tmp_path / "binary.toml", flags())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("policy = \nx = 1", ["not TOML", "line 1"]),
        ("polizy = 1", ["unknown key polizy", "policy"]),
        ("[controll]\ngroup = 'x'", ["unknown key controll"]),
        ("[control]\ngruop = 'x'", ["unknown key control.gruop", "group"]),
        ("[gpu.0]\nmount = '/x'", ["unknown key gpu.0.mount", "max_inst"]),
        ("[gpu.x]\npolicy = 1", ["gpu.x", "index"]),
        ("[gpu.01]\npolicy = 1", ["gpu.01"]),
        ("gpu = 3", ["gpu = 3", "table"]),
        ("control = 'x'", ["control = 'x'", "table"]),
        ("[gpu]\n0 = 1", ["gpu.0 = 1", "table"]),
        ("policy = 6", ["policy = 6", "0-5"]),
        ("policy = -1", ["policy = -1", "0-5"]),
        ("policy = true", ["policy = True", "0-5"]),
        ("policy = 1.0", ["policy = 1.0", "0-5"]),
        ("policy = '+1'", ["policy = '+1'", "0-5"]),
        ("max_inst = 26", ["max_inst = 26", "1-25"]),
        ("prio_ratio = 19", ["prio_ratio = 19", "20-99"]),
        ("[gpu.0]\nprio_ratio = 100", ["gpu.0.prio_ratio = 100", "20-99"]),
        ("default_memsize = '1GB'", ["default_memsize = '1GB'", "powers of 1024"]),
        ("default_memsize = -1", ["default_memsize = -1"]),
        ("default_memsize = true", ["default_memsize = True"]),
        ("overcommit = 1", ["overcommit = 1", "true or false"]),
        ("overcommit = 'yes'", ["overcommit = 'yes'", "true or false"]),
        ("mount = 'run/cgpu'", ["mount = 'run/cgpu'", "absolute path"]),
        ("mount = '/run/../etc'", ["mount", "absolute path"]),
        ("mount = 3", ["mount = 3", "absolute path"]),
        ("runtime_dir = '/run/cgpu/x'", ["runtime_dir = /run/cgpu/x", "would hide it"]),
        ("lib_dir = '/run/cgpu'", ["lib_dir = /run/cgpu", "would hide it"]),
        ("bin_dir = '/run/cgpu/bin'", ["bin_dir = /run/cgpu/bin", "would hide it"]),
        ("runtimes = []", ["runtimes = []", "absolute paths"]),
        ("runtimes = 'runc'", ["runtimes = 'runc'", "a list of 1-16"]),
        ("runtimes = ['./runc']", ["runtimes = ['./runc']", "absolute paths"]),
        ('runtimes = ["a\\nb"]', ["runtimes = ", "absolute paths"]),
        ("simulate = '2x'", ["simulate = '2x'", "2x24GiB"]),
        ("simulate = 2", ["simulate = 2", "2x24GiB"]),
        ("log_level = 'loud'", ["log_level = 'loud'", "debug, info, warning, error"]),
        ("log_level = []", ["log_level = []"]),
        ("[control]\ngroup = 'a b'", ["control.group = 'a b'"]),
        ("[control]\nmax_memsize = 0", ["control.max_memsize = 0", "not 0"]),
        ("[control]\nmax_weight = 26", ["control.max_weight = 26", "0-25"]),
        ("[control]\nmax_instances = -1", ["control.max_instances = -1"]),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load(tmp_path, text)
    assert str(tmp_path / "config.toml") in str(error.value)
    assert str(error.value).isprintable()
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--policy", "6"], ["--policy '6'", "0-5"]),
        (["--policy", "007"], ["--policy '007'"]),
        (["--max-inst", "1_0"], ["--max-inst '1_0'"]),
        (["--simulate", "two"], ["--simulate 'two'", "2x24GiB"]),
        (["--simulate", "17x1GiB"], ["--simulate '17x1GiB'", "1-16"]),
        (["--default-memsize", "1e9"], ["--default-memsize '1e9'"]),
        (["--mount", "x"], ["--mount 'x'"]),
        (["--group", "-x-"], ["--group '-x-'"]),
    ],
)
def test_mistakes_in_flags_are_named(tmp_path: Path, arguments: list[str], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        load(tmp_path, "", f"{arguments[0]}={arguments[1]}")
    for word in words:
        assert word in str(error.value)


def test_a_table_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    loaded = load(tmp_path, "[gpu.2]\npolicy = 1")
    with pytest.raises(UserError, match=r"config.toml: gpu.2: no such GPU; this node has 0, 1") as error:
        loaded.check_gpus([0, 1])
    assert error.value.exit_code == 2
    loaded.check_gpus([0, 1, 2])
    assert loaded.settings([0, 1]) == {0: GpuSettings(), 1: GpuSettings()}


def test_what_it_said_before_is_taken_where_it_is_wrong_now(tmp_path: Path) -> None:
    before = load(tmp_path, "policy = 3\n[control]\ngroup = 'gpuusers'").text
    path = tmp_path / "config.toml"
    path.write_text("policy = 9")
    loaded = config.load(path, flags("--max-inst", "5"), before)
    assert loaded.settings([0])[0] == GpuSettings(Policy.FIXED, 5, 90) and loaded.control.group == "gpuusers"
    assert loaded.refused == f"{path}: policy = 9: an integer 0-5 is allowed" and loaded.text == before
    path.unlink()
    assert config.load(path, flags(), b"").refused == f"{path}: no such file"
    path.write_text("policy = 1")
    loaded = config.load(path, flags(), before)
    assert (loaded.refused, loaded.text) == ("", b"policy = 1")


@pytest.mark.parametrize(("wrong", "before"), [(("--policy", "9"), b""), ((), b"key_of_another_version = 1")])
def test_what_it_said_before_does_not_help(tmp_path: Path, wrong: tuple[str, ...], before: bytes) -> None:
    path = tmp_path / "config.toml"
    path.write_text("max_inst = 0")
    with pytest.raises(UserError, match="max_inst = 0"):
        config.load(path, flags(*wrong), before)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("1x24GiB", [24 * GIB]),
        ("2x24GiB", [24 * GIB] * 2),
        ("4x23028MiB", [23028 << 20] * 4),
        ("1x15109M", [15109 << 20]),
    ],
)
def test_simulate(text: str, sizes: list[int]) -> None:
    assert parse_simulate(text) == sizes


@pytest.mark.parametrize("text", ["", "x", "2", "2x", "x24GiB", "0x24GiB", "24GiB", "2 x 24GiB", "2X24GiB", "-1x1GiB",
                                  "2x24GB", "02x24GiB", "1x0", "1x1", "17x1GiB", "1x1GiBx1", "9" * 5000])  # fmt: skip
def test_no_simulate(text: str) -> None:
    with pytest.raises(UserError, match="COUNTxSIZE"):
        parse_simulate(text)


def test_simulate_words(tmp_path: Path) -> None:
    assert load(tmp_path, "simulate = 'auto'").simulate is None
    assert load(tmp_path, "simulate = 'off'").simulate == ()


def test_the_smallest_values(tmp_path: Path) -> None:
    text = "default_memsize = 0\nsimulate = '1x1MiB'\n[control]\ngroup = 'g'\n"
    loaded = load(tmp_path, text + "max_memsize = 1\nmax_weight = 0\nmax_instances = 0")
    assert (loaded.default_memsize, loaded.simulate) == (0, (1 << 20,))
    assert loaded.control == ControlConfig("g", 1, 0, False, 0)
    with pytest.raises(UserError, match="simulate"):
        load(tmp_path, "simulate = '1x1023K'")


def test_the_example_in_the_documentation_loads(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    loaded = load(tmp_path, page.read_text().split("```toml\n")[1].split("```")[0])
    assert loaded.settings([0, 1])[1] == GpuSettings(Policy.FIXED, 10, 90)
    assert loaded.control == ControlConfig("gpu", 8 * GIB, 4)


def test_the_documentation_lists_every_key_and_flag() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    for key in (*config._NODE, *config._BOOT, *config._CONTROL):
        assert f"| `{key}` |" in page
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    for action in parser._actions:
        for flag in action.option_strings:
            assert flag in page or flag in ("-h", "--help")


def test_a_runtime_folder_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    longest = "/" + "r" * 77
    assert load(tmp_path, f"runtime_dir = '{longest}'").runtime_dir == Path(longest)
    with pytest.raises(UserError, match="runtime_dir = .*: at most 78 bytes are allowed") as error:
        load(tmp_path, f"runtime_dir = '{longest}r'")
    assert error.value.exit_code == 2


def test_a_group_may_be_a_number(tmp_path: Path) -> None:
    for written in ("4711", "'4711'"):
        assert load(tmp_path, f"[control]\ngroup = {written}").control.group == "4711"


