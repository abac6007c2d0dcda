"""Packages of a Debian release that need not be this machine's, unpacked into build/ and not installed."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from debian import mirror
from node import ROOT

KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"


def unpack(release: str, *packages: str) -> Path:
    """The folder in which these packages are unpacked, without those that they depend on.

    Skips the test where they cannot be had, and says why.
    """
    if os.geteuid() or not shutil.which("apt-get"):
        pytest.skip(f"packages of Debian's {release} need root and apt-get")
    folder = ROOT / "build/debs" / release / packages[0]
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wanted = " ".join(packages)
        if not ((folder / "ready").exists() and (folder / "ready").read_text() == wanted):
            try:
                _download(folder, release, packages)
            except subprocess.SubprocessError as error:
                said = getattr(error, "stderr", None) or b""
                pytest.skip(f"no {wanted} of {release}: {error}: {said.decode(errors='replace').strip()[-300:]}")
            (folder / "ready").write_text(wanted)
    return folder / "root"


def _download(folder: Path, release: str, packages: tuple[str, ...]) -> None:
    for part in ("lists/partial", "cache/archives/partial", "deb"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "sources.list").write_text(f"deb [signed-by={KEYS}] {mirror()} {release} main\n")
    options = [f"Dir::Etc::sourcelist={folder}/sources.list", "Dir::Etc::sourceparts=-", "Dir::State::status=/dev/null",
               f"Dir::State::lists={folder}/lists", f"Dir::Cache={folder}/cache", "APT::Sandbox::User=root"]
    apt = ["apt-get", "--quiet", *(word for option in options for word in ("-o", option))]
    subprocess.run([*apt, "update"], check=True, capture_output=True, timeout=120)
    subprocess.run([*apt, "download", *packages], check=True, capture_output=True, timeout=400, cwd=folder / "deb")
    for package in (folder / "deb").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True, capture_output=True, timeout=120)
    for part in ("lists", "cache"):
        shutil.rmtree(folder / part)
