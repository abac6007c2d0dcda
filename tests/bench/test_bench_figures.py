"""How figures are worked out from the device's timeline."""

import struct
import xml.etree.ElementTree as ElementTree

import pytest
import shares
from device import LIVE, MAGIC, VERSION, Device, Timeline, exclusive, hand_overs, longest_gap, worst_window
from hypothesis import given
from hypothesis import strategies as st
from node import wait_until
from plots import ratio_errors
from records import make_record

STRETCHES = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 60)), min_size=1, max_size=12)


def timeline_of(stretches):
    """(gap, length) pairs as (start, end) stretches."""
    now, made = 0, []
    for gap, length in stretches:
        made.append((now + gap, now + gap + length))
        now += gap + length
    return made


@given(STRETCHES, st.integers(1, 100))
def test_most_in_any_window(stretches, window):
    runs = timeline_of(stretches)
    end = runs[-1][1]

    def used(at):
        return sum(max(0, min(until, at + window) - max(begin, at)) for begin, until in runs)

    most, at = worst_window(runs, window, 0, end)
    assert most == max(map(used, range(0, end - window + 1)), default=0)
    assert most == (used(at) if window <= end else 0)


@given(STRETCHES)
def test_longest_gap(stretches):
    runs = timeline_of(stretches)
    end = runs[-1][1] + 7
    busy = {moment for begin, until in runs for moment in range(begin, until)}
    longest = run = 0
    for moment in range(end):
        run = 0 if moment in busy else run + 1
        longest = max(longest, run)
    assert longest_gap(runs, 0, end) == longest


def test_what_others_ran_in_the_midst_of_a_kernel_is_not_its_own():
    runs = [(0, 10), (20, 40), (50, 60)]
    assert exclusive(runs, []) == runs
    assert exclusive(runs, [(10, 20), (40, 50)]) == runs
    assert exclusive(runs, [(25, 30), (32, 35), (55, 70)]) == [(0, 10), (20, 25), (30, 32), (35, 40), (50, 55)]
    assert exclusive(runs, [(5, 10)]) == [(0, 5), (20, 40), (50, 60)]


def test_hand_overs_are_the_idle_time_between_two_programs():
    runs = {1: [(0, 10), (12, 20), (50, 60)], 2: [(25, 40), (40, 48)]}
    assert hand_overs(runs, 0, 100) == [5, 2]
    assert hand_overs(runs, 0, 45) == [5]


@pytest.mark.parametrize("parts,weights,percent", [
    ([1, 2], [1, 2], 0), ([0.3, 0.6], [1, 2], 0), ([0.5, 0.5], [1, 2], 50), ([0.33, 0.67], [1, 2], 1)])
def test_the_error_is_of_the_device_time_used(parts, weights, percent):
    assert shares.error(parts, weights) == pytest.approx(percent)


@pytest.mark.parametrize("weights,kernels,seconds", [
    ([1, 2], [100, 100], 8), ([1, 2], [10_000, 10_000], 9), ([1, 2], [50_000, 50_000], 45),
    ([1, 2, 3, 4, 5], [10_000] * 5, 45), ([1, 2], [10, 10_000], 8), ([1, 2], [1_000, 50_000], 22.5)])
def test_a_window_is_8_s_and_300_kernels_of_each(weights, kernels, seconds):
    assert shares.Cell(weights, kernels).seconds() == pytest.approx(seconds)


def test_a_cells_programs_and_params():
    cell = shares.pair([10, 10_000], "proportional", True)
    assert cell.params() == {"weights": [1, 2], "kernel_us": [10, 10_000], "grid": "proportional", "sync": True}
    assert cell.commands("load")[1] == ["load", "-k", 10_000, "-s", 10_000, "-g", "-t", 3600]
    assert shares.pair(100).params()["kernel_us"] == 100


def test_reading_the_devices_state(tmp_path):
    path = tmp_path / "gpu.state"
    slots = [(LIVE, 41, 300, 0, 9, 9), (0, 42, 1, 0, 0, 0), (LIVE, 43, 400, 0, 9, 7)]
    path.write_bytes(struct.pack("<IIQQQIIIi", MAGIC, VERSION, 1000, 700, 0, len(slots), 64, 40, -1).ljust(64, b"\0")
                     + b"".join(struct.pack("<IIQQQQ", *slot) for slot in slots))
    device = Device(path)
    assert (device.snapshot().now, device.busy_ns(), device.by_pid()) == (1000, 700, {41: 300, 43: 400})
    assert device.holder() == 43
    path.write_bytes(b"\0" * 4096)
    with pytest.raises(ValueError):
        Device(path)


def test_the_plot_of_ratio_errors_is_svg(tmp_path):
    made = [make_record("ratio_error", {"weights": [1, 2], "kernel_us": kernel, "grid": grid, "sync": sync}, [0.1], "%")
            for kernel in (10, 50_000) for grid in ("constant", "proportional") for sync in (True, False)]
    ratio_errors(made, tmp_path / "plot.svg")
    root = ElementTree.parse(tmp_path / "plot.svg").getroot()
    circles = root.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 8 + 4  # each cell, and the legend's


def test_a_timeline_is_read_by_pid_and_in_order(tmp_path):
    written = b"".join(struct.pack("<IIQQ", *one) for one in [(2, 3, 9, 10), (2, 0, 1, 2), (5, 0, 2, 4)])
    (tmp_path / "written").write_bytes(written)
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntrap 'exit 0' TERM\ncat {tmp_path}/written\ntouch {tmp_path}/ready\n"
                       "while :; do sleep 0.01; done\n")
    program.chmod(0o755)
    path = tmp_path / "gpu.state"
    path.write_bytes(struct.pack("<II", MAGIC, VERSION).ljust(4096, b"\0"))
    with Timeline(program, Device(path), tmp_path / "out") as timeline:
        wait_until((tmp_path / "ready").exists, "the program")
    assert timeline.runs == {2: [(1, 2), (9, 10)], 5: [(2, 4)]}
    assert timeline.lost == 3
