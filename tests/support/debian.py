"""Debian's packages of NVIDIA's driver (non-free, not ours to ship), fetched for the tests that ask for them."""

from __future__ import annotations

import subprocess
from pathlib import Path

SERIES = {"535": "bookworm", "550": "trixie"}
"""Driver series, and the release that has it."""


def mirror() -> str:
    """Where this machine has Debian's packages from."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages", "Origin: Debian",
               "Component: main"]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout.split()
    return next((one for one in found if one.rstrip("/").endswith("/debian")), found[0])


def download(series: str, folder: Path, *packages: str) -> None:
    """Unpacks that series' ``packages`` below ``folder``, by a package configuration of its own. Needs the network."""
    for part in ("lists/partial", "cache/archives/partial", "deb"):
        (folder / part).mkdir(parents=True)
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    source = f"deb [signed-by={key}] {mirror()} {SERIES[series]} non-free\n"
    (folder / "sources.list").write_text(source)
    options = [f"Dir::Etc::sourcelist={folder}/sources.list", "Dir::Etc::sourceparts=-",
               f"Dir::State::lists={folder}/lists", f"Dir::Cache={folder}/cache", "APT::Sandbox::User=root"]
    apt = ["apt-get", *(word for option in options for word in ("-o", option))]
    subprocess.run([*apt, "update"], check=True, capture_output=True, timeout=120)
    subprocess.run([*apt, "download", *packages], check=True, capture_output=True, timeout=300, cwd=folder / "deb")
    for package in (folder / "deb").iterdir():
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True, timeout=60)
