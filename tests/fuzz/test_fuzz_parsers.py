"""Every parser of bytes that others write: a typed value or one line that says what is wrong, whatever comes.

CGPU_FUZZ_CASES and CGPU_FUZZ_SEED try more and others. An input that fails belongs into ``corpus``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mutate import cases, corpus

from cgpufs import parse
from cgpusched import config, store
from cgpusched.commands import Create, Destroy
from cgpusched.containers import spec, variables, wire
from cgpusched.containers.variables import Ask, Card
from cgpusched.daemon.containers.book import _State
from cgpusched.daemon.server import requests
from cgpusched.daemon.server import wire as clients
from cgpusched.daemon.tally import Tally
from cgpusched.engines import containerd, docker
from cgpusched.errors import UserError
from cgpusched.fields import pairs
from cgpusched.model import Gpu, GpuSettings
from cgpusched.units import SIZE_MAX, check_id

BINARY = "/var/lib/cgpud/bin/cgpu-runtime"
GIB = 1 << 30
CARDS = [Card(index, f"GPU-0000000{index}-1111-2222-3333-444444444444", 24 * GIB) for index in range(2)]
EDIT = spec.Edit((spec.Mount("/lib/ours", "/usr/local/cgpu/lib", executable=True), spec.Mount("/view/x", "/run/cgpu")),
                 "0,1", BINARY, "/run/cgpu", "/run/cgpud/view/x")


def told(error: Exception, ours: bool) -> None:
    """What a refusal must be fit for: a line of a log, an answer, a terminal.

    ``ours``: the administrator's own file: it may be said at length.
    """
    text = str(error)
    assert text and (ours or len(text) < 1000 and "\n" not in text)
    assert text.replace("\n", "").isprintable(), ascii(text)
    text.encode()


def fuzz(target: str, check: Callable[[bytes], object], ours: bool = False) -> None:
    """``check`` raises UserError, or ProtocolError, for what it refuses. Something is taken, and something refused."""
    taken = refused = 0
    for data in cases(target):
        try:
            check(data)
            taken += 1
        except (UserError, clients.ProtocolError, wire.ProtocolError) as error:
            told(error, ours)
            refused += 1
        except Exception as error:
            error.add_note(f"input of {target}: {data!r}")
            raise
    assert taken and refused


def test_the_corpus_is_there() -> None:
    assert {path.name for path in (Path(__file__).parent / "corpus").iterdir()} == {
        "config", "containerd", "control", "counters", "docker", "hello", "inst_ctl", "limits", "oci", "question",
        "request", "state", "stored"}


# Control files


def test_integers_and_sizes() -> None:
    def check(data: bytes) -> None:
        with contextlib.suppress(UserError):
            assert 0 <= parse.size(data) <= SIZE_MAX
        with contextlib.suppress(UserError):
            parse.upgrade(data)
        value = parse.integer(data, 1, 100)
        assert str(value).encode() == data.strip(b" \t\n") and 1 <= value <= 100

    fuzz("control", check)


def test_commands() -> None:
    def check(data: bytes) -> None:
        command = parse.inst_ctl(data)
        assert isinstance(command, Create | Destroy) and check_id(command.id) == command.id
        assert not {"/", "\0"} & set(command.id) and command.id not in (".", "..")
        if isinstance(command, Create):
            sizes = command.memsize or ()
            said = [f"create {command.id}", "gpu=" + ",".join(map(str, command.gpus)),
                    *(["memsize=" + ",".join(map(str, sizes))] if command.memsize else []),
                    *([f"weight={command.weight}"] if command.weight is not None else []),
                    f"highprio={int(command.highprio)}"]
            assert parse.inst_ctl(" ".join(said).encode()) == command

    fuzz("inst_ctl", check)


# Sockets


def test_hellos() -> None:
    def check(data: bytes) -> None:
        hello = clients.parse_hello(data)
        assert len(data) == 64 and 0 <= hello.pid < 1 << 32

    fuzz("hello", check)


def test_questions_of_the_runtime() -> None:
    def check(data: bytes) -> None:
        question = wire.parse(data)
        assert "\0" not in question.id + question.bundle
        pairs(id=question.id).encode("utf-8", "backslashreplace")
        wire.refusal(22, f"container {question.id}").packed()

    fuzz("question", check)


def test_the_state_that_a_hook_brings() -> None:
    def check(data: bytes) -> None:
        state = _State.parse(data)
        assert state.pid > 1 and state.bundle.startswith("/") and "\0" not in state.bundle

    fuzz("state", check)


def test_requests_of_cgpuctl() -> None:
    def check(data: bytes) -> None:
        request = requests.parse(data)
        json.dumps({"do": request.do, "id": request.id, **vars(request.shares)}).encode()

    fuzz("request", check)


# Files


def test_configurations(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    flags = parser.parse_args([])

    def check(data: bytes) -> None:
        path.write_bytes(data)
        try:
            loaded = config.load(path, flags)
        except UserError as error:
            assert str(path) in str(error), "it says where"
            raise UserError(str(error).replace(str(path), "config.toml")) from None
        assert all(place.is_absolute() for place in (loaded.mount, loaded.runtime_dir, loaded.lib_dir))
        assert loaded.audit_interval == 0 or 0.1 <= loaded.audit_interval <= 3600
        loaded.check_gpus(loaded.gpu)
        loaded.settings(loaded.gpu)

    fuzz("config", check, ours=True)


def test_configurations_of_containers() -> None:
    def check(data: bytes) -> None:
        found = spec.read(data)
        before = copy.deepcopy(found)
        env = spec.environment(found)
        asked = variables.ask(env, CARDS)
        if isinstance(asked, Ask):
            assert all(0 < size <= 24 * GIB for size in asked.memsize) and len(asked.memsize) == len(asked.gpus)
            asked.visible.encode()
        with contextlib.suppress(UserError):
            wire.Answer(wire.DONE, wire.lines(("root", spec.root(found, "/bundle")))).packed()
        for folder in spec.library_folders(found):
            assert folder.startswith("/")
            wire.Answer(wire.DONE, wire.lines(("bind", folder))).packed()
        spec.missing(found, EDIT.mounts)
        made = spec.edit(found, EDIT)
        assert found == before
        assert spec.read(spec.write(made)) == made == spec.edit(made, EDIT)
        assert made["hooks"]["createRuntime"][-1]["path"] == BINARY or before["hooks"]["createRuntime"]
        assert [mount["destination"] for mount in made["mounts"][-2:]] == ["/usr/local/cgpu/lib", "/run/cgpu"]

    fuzz("oci", check)


def engine(module: Any, parsed: Callable[[str], Any], new: object) -> Callable[[bytes], None]:
    """Ours goes in, nothing else changes, and out again."""

    def check(data: bytes) -> None:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            raise UserError("not a text") from None
        with contextlib.suppress(UserError):
            module.restore(text, BINARY, {})
        made = module.configure(text, BINARY, default=True)
        assert BINARY in made.text
        parsed(made.text.encode().decode())
        assert module.configure(made.text, BINARY, default=True).text == made.text, "twice is once"
        json.dumps(made.before)
        back = module.restore(made.text, BINARY, made.before).text
        assert parsed(back) == parsed(text) or parsed(back) == new

    return check


def test_the_configuration_of_docker() -> None:
    fuzz("docker", engine(docker, lambda text: json.loads(text) if text.strip() else {}, {}))


def test_the_configuration_of_containerd() -> None:
    fuzz("containerd", engine(containerd, tomllib.loads, {}), ours=True)  # it says what to put in by hand


# What a predecessor left


def test_the_state_that_a_daemon_left() -> None:
    """What is taken can be gone on with, and written again."""
    gpus = [Gpu(index, f"GPU-0000000{index}-1111-2222-3333-444444444444", "card", 24 * GIB) for index in range(2)]

    def check(data: bytes) -> None:
        stored = store.load(data)
        state, lines = store.restore(stored, gpus, {gpu.index: GpuSettings() for gpu in gpus}, 0, False)
        for gpu in state.gpus:
            assert state.free_weight(gpu) >= 0 and state.free_memory(gpu) >= 0
        assert store.load(store.dump(state, stored.boot, stored.anchors, stored.containers)).boot == stored.boot
        assert all(line.isprintable() for line in lines)

    fuzz("stored", check)


def test_the_counters_that_a_daemon_left() -> None:
    def check(data: bytes) -> None:
        try:
            tally = Tally.load(data, "boot-1")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"none: {type(error).__name__}") from None
        tally.dump("boot-1")

    fuzz("counters", check)


def test_the_limits_that_a_daemon_left() -> None:
    fuzz("limits", lambda data: store.limits(data.decode("ascii", "replace")))


@pytest.mark.parametrize("target", ["config", "containerd", "docker", "oci"])
def test_seeds_are_what_they_are_to_be(target: str) -> None:
    """At least one of each corpus is taken as it is; mutations of nothing but garbage would find nothing."""
    check: dict[str, Callable[[bytes], object]] = {
        "config": lambda data: tomllib.loads(data.decode()),
        "containerd": lambda data: containerd.configure(data.decode(), BINARY),
        "docker": lambda data: docker.configure(data.decode(), BINARY),
        "oci": lambda data: spec.edit(spec.read(data), EDIT),
    }
    taken = 0
    for data in corpus(target):
        with contextlib.suppress(ValueError, RecursionError, UserError):
            check[target](data)
            taken += 1
    assert taken >= 2
