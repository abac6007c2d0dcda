"""The hook's log lines never harm the program they are written in."""

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest
from driver_tools import Compile, run

PROGRAM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int main(int count, char **a) {
    void (*say)(const char *, const char *) = dlsym(dlopen(a[1], RTLD_NOW), "test_log");
    char big[5000];
    memset(big, 'x', sizeof big - 1), big[sizeof big - 1] = 0;
    errno = 77;
    for (int i = 0; i < atoi(a[2]); i++)
        say(a[3], !strcmp(a[4], "big") ? big : a[4]);
    int kept = errno;
    sigset_t pending, blocked;
    sigpending(&pending), sigprocmask(0, NULL, &blocked);
    printf("%d %d %d\\n", kept, sigismember(&pending, SIGPIPE), sigismember(&blocked, SIGPIPE));
}"""
UNHARMED = "77 0 0\n"


@pytest.fixture
def program(compile_program: Compile) -> Path:
    return compile_program("say", PROGRAM)


@pytest.mark.parametrize(("level", "setting", "shown"), [
    ("error", "", True), ("warning", "", True), ("info", "", False), ("debug", "", False),
    ("info", "info", True), ("debug", "info", False), ("debug", "debug", True), ("warning", "error", False),
    ("warning", "nonsense", True)])
def test_levels(level: str, setting: str, shown: bool, program: Path, hook: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    env = {"CGPU_LOG": str(log)} | ({"CGPU_LOG_LEVEL": setting} if setting else {})
    assert run(program, hook, 1, level, "hello there", env=env) == UNHARMED
    text = log.read_text() if log.exists() else ""
    assert (f"cgpu: level={level} pid=" in text and text.endswith(" hello there\n")) == shown
    assert bool(text) == shown


def test_a_flood_is_held_back_and_a_long_line_cut(program: Path, hook: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    run(program, hook, 5000, "warning", "big", env={"CGPU_LOG": str(log)})
    lines = log.read_text().splitlines()
    assert 100 <= len(lines) <= 400
    assert all(line.startswith("cgpu: ") and len(line) < 1000 for line in lines)


def test_a_reader_that_is_gone_kills_nobody(program: Path, hook: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([program, hook, "3", "error", "hello"], stdout=subprocess.PIPE, stderr=write, timeout=30,
                          preexec_fn=lambda: signal.signal(signal.SIGPIPE, signal.SIG_DFL))
    os.close(write)
    assert (done.returncode, done.stdout.decode()) == (0, UNHARMED)


def test_a_full_pipe_stops_nobody(program: Path, hook: Path) -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    done = subprocess.run([program, hook, "3", "error", "hello"], stdout=subprocess.PIPE, stderr=write, timeout=30)
    os.close(write), os.close(read)
    assert (done.returncode, done.stdout.decode()) == (0, UNHARMED)


def test_a_closed_stderr(program: Path, hook: Path) -> None:
    done = subprocess.run([program, hook, "3", "error", "hello"], stdout=subprocess.PIPE, timeout=30,
                          preexec_fn=lambda: os.close(2))
    assert (done.returncode, done.stdout.decode()) == (0, UNHARMED)


def test_lines_of_many_processes_do_not_mix(program: Path, hook: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = {"args": (program, hook, 50, "error", "x" * 400), "kwargs": {"env": {"CGPU_LOG": str(log)}}}
    threads = [threading.Thread(target=run, **arguments) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    lines = log.read_text().splitlines()
    assert len(lines) == 200
    assert all(line.startswith("cgpu: level=error pid=") and line.endswith(" " + "x" * 400) for line in lines)
