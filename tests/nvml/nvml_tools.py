"""Programs in an instance that say what they are told."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from node import BIN, Node

HERE = Path(__file__).resolve().parent
OURS = [81, 145, 213, 214, 215]
"""Slots of the private table that the hook replaces."""


class Program:
    """views.py, spoken to line by line."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen([*command, sys.executable, str(HERE / "views.py")], env=env,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        hello = self._answer()
        self.pid: int = hello["pid"]
        self.env: dict[str, str] = hello["env"]

    def _answer(self) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the program ended with {self.process.wait(10)}"
        return json.loads(line)

    def ask(self, *words: object) -> Any:
        assert self.process.stdin
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def beside(self) -> Program:
        """Another process of the same instance."""
        return Program([], self.env)

    def end(self) -> None:
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


def ask_for_table(node: Node, library: Path, env: Mapping[str, str], log: Path) -> dict[str, Any]:
    run = subprocess.run([BIN / "cgpuctl", "run", "--mem", "1GiB", "--cover", "never", "--", sys.executable,
                          HERE / "private.py", library], env={**node.env, **env, "CGPU_LOG": str(log)},
                         capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    told: dict[str, Any] = json.loads(run.stdout)
    return told
