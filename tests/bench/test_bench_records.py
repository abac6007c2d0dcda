"""The record format that readers of bench/results/latest.json rely on, the musts, and the exit status."""

import contextlib
import json
import sys
from pathlib import Path

import pytest
import records
import run
from musts import Must, must
from records import Record, make_record, percentile, row

KEYS = ["name", "params", "value", "unit", "baseline", "runs", "min", "max", "device"]
CELL = {"weights": [1, 2], "kernel_us": 100, "grid": "constant", "sync": True}


def test_a_record_is_the_median_of_its_runs():
    one = make_record("launch_added_ns", {"threads": 1, "limit": True}, [3.0, 9.0, 1.0], "ns", 2.25)
    assert one.plain() == {"name": "launch_added_ns", "params": {"threads": 1, "limit": True}, "value": 3.0,
                           "unit": "ns", "baseline": 2.25, "runs": 3, "min": 1.0, "max": 9.0, "device": "simulated"}
    assert list(one.plain()) == KEYS


def test_the_file_is_a_list_of_records(tmp_path: Path):
    path = tmp_path / "results" / "latest.json"
    made = [make_record("ratio_error", CELL, [0.5], "%"),
            make_record("handover_us", {"percentile": 50}, [60.0], "us", 20.0)]
    records.write(made, path)
    read = json.loads(path.read_text())
    assert read == [one.plain() for one in made]
    assert read[0]["baseline"] is None and read[0]["params"] == CELL


@pytest.mark.parametrize("name,params,baseline,bound", [
    ("launch_added_ns", {"threads": 4, "limit": True}, 2.0, ("<=", 5)),
    ("launch_added_ns", {"threads": 4, "limit": False}, 2.0, None),
    ("alloc_added_ns", {"live": 100_000}, 100.0, ("<=", 100)),
    ("free_added_ns", {"live": 10}, 100.0, ("<=", 60)),
    ("ratio_error", CELL, None, ("<=", 1)),
    ("ratio_error", {**CELL, "kernel_us": 50_000}, None, ("<=", 1)),
    ("ratio_error", {**CELL, "kernel_us": [10, 10_000]}, None, ("<=", 1)),
    ("ratio_error", {**CELL, "weights": [1, 2, 3, 4, 5]}, None, ("<=", 2)),
    ("ratio_error", {**CELL, "weights": [1, 2, 3, 4, 5], "kernel_us": 50_000}, None, None),
    ("device_use", CELL, 100.0, (">=", 98.5)),
    ("device_use", {**CELL, "sync": False}, 100.0, (">=", 99)),
    ("longest_gap_cycles", {"weights": [1, 2], "kernel_us": 1000}, None, ("<=", 2)),
    ("device_use_bursty", {}, 100.0, (">=", 97)),
    ("highprio_latency_us", {"kernel_us": 100, "percentile": 50}, 1.0, ("<=", 1100)),
    ("highprio_latency_us", {"kernel_us": 1000, "percentile": 50}, 1.0, ("<=", 2000)),
    ("highprio_latency_us", {"kernel_us": 1000, "percentile": 99}, 1.0, None),
    ("highprio_latency_us", {"kernel_us": 10_000, "percentile": 50}, 1.0, None),
    ("highprio_share", {"prio_ratio": 90, "kernel_us": 10_000}, None, ("<=", 0.91)),
    ("highprio_delivered", {"prio_ratio": 90, "kernel_us": 10}, None, (">=", 0.85)),
    ("handover_us", {"percentile": 50}, 20.0, ("<=", 80)),
    ("handover_us", {"percentile": 99}, 20.0, None),
    ("ratio_error_loaded", CELL, None, ("<=", 5)),
    ("device_use_loaded", CELL, None, (">=", 93)),
    ("read_us", {"of": "tree", "clients": 1, "percentile": 99}, 100.0, ("<=", 100)),
    ("read_us", {"of": "view", "clients": 8, "percentile": 50}, 100.0, ("<=", 150)),
    ("read_beside_us", {"readers": 16, "percentile": 50}, 100.0, None),
    ("docker_added_ms", {"asks": True}, 300.0, ("<=", 150)),
    ("docker_added_ms", {"asks": False}, 300.0, ("<=", 60)),
    ("scheduler_core", {"gpus": 8, "containers": 25}, None, ("<=", 5)),
    ("scheduler_core", {"gpus": 1, "containers": 25}, None, None),
    ("kill_to_next_ms", {}, None, ("<=", 10)),
    ("stop_to_next_ms", {}, None, ("<=", 60)),
    ("ratio_error_25", {}, None, None),
])
def test_the_musts(name, params, baseline, bound):
    assert must(name, params, baseline) == (bound and Must(*bound))


@pytest.mark.parametrize("name,params,value,missed", [
    ("ratio_error", CELL, 1.0, False), ("ratio_error", CELL, 1.0001, True),
    ("device_use", CELL, 98.5, False), ("device_use", CELL, 98.4999, True),
    ("ratio_error_25", {}, 99.0, False)])
def test_a_miss(name, params, value, missed):
    assert make_record(name, params, [value], "%").missed is missed


def test_the_table_prints_measured_and_must():
    line = row(make_record("ratio_error", CELL, [1.25], "%"))
    assert "1.25 %" in line and "<= 1" in line and "MISSED" in line and "weights=1:2 kernel_us=100" in line
    line = row(make_record("device_use", CELL, [99.5, 99.0], "%", 99.9))
    assert ">= 98.5" in line and "MISSED" not in line and "bare 99.9" in line and "99 to 99.5" in line


@pytest.mark.parametrize("percent,value", [(50, 50), (99, 99), (100, 100), (0.5, 1)])
def test_percentiles(percent, value):
    assert percentile(range(100, 0, -1), percent) == value


class FakeBench:
    """In place of a node and its programs."""

    def __init__(self, *_: object) -> None:
        self.records: list[Record] = []


def run_with(monkeypatch, tmp_path: Path, error: float) -> int:
    monkeypatch.setattr(run, "running_node", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(run, "Bench", FakeBench)
    monkeypatch.setattr(run.os, "geteuid", lambda: 0)
    monkeypatch.setattr(run, "PARTS", {"grid": lambda bench: bench.records.append(
        make_record("ratio_error", CELL, [error], "%"))})
    monkeypatch.setattr(sys, "argv", ["run.py", "--only", "grid", "--out", str(tmp_path / "out.json")])
    return run.main()


@pytest.mark.parametrize("error,status", [(0.5, 0), (1.5, 1)])
def test_exit_status_says_whether_a_must_was_missed(monkeypatch, tmp_path, capsys, error, status):
    assert run_with(monkeypatch, tmp_path, error) == status
    assert [one["value"] for one in json.loads((tmp_path / "out.json").read_text())] == [error]
    assert f"{status} of them missed" in capsys.readouterr().out
