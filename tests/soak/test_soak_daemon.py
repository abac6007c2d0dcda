"""``make soak``, but short: the daemon is killed and upgraded under load, no operation fails and no write is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from node import ROOT

SECONDS, CHANGES = 10, 4


@pytest.mark.timeout(600)
def test_nobody_notices(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, ROOT / "bench/soak", "--seconds", str(SECONDS), "--changes", str(CHANGES), "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    if done.returncode == 2:
        pytest.skip(done.stderr.strip())
    assert out.exists(), done.stderr
    figures = json.loads(out.read_text())
    values = {(one["name"], one["params"].get("of")): one["value"] for one in figures}
    assert {kind: values["soak_changes", kind] for kind in ("kill", "upgrade")} == {"kill": 2, "upgrade": 2}
    for name in ("soak_failed", "soak_lost_writes", "soak_wrong"):
        found = [one["value"] for one in figures if one["name"] == name]
        assert found and not any(found), done.stdout
    assert all(one["params"]["operations"] > 20 for one in figures if one["name"] == "soak_failed"), done.stdout
