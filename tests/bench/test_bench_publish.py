"""docs/benchmarks.md is filled in from the JSON of a run."""

from pathlib import Path

import pytest
from publish import BEGIN, END, SOAK_BEGIN, SOAK_END, publish
from records import make_record

PAGE = Path(__file__).resolve().parents[2] / "docs/benchmarks.md"
CELL = {"weights": [1, 2], "kernel_us": 100, "grid": "constant", "sync": True}


def test_the_pages_marks_are_where_figures_go():
    made = [make_record("ratio_error", CELL, [1.5], "%"), make_record("device_use", CELL, [99.0, 99.2], "%", 99.9)]
    plain, plots = [one.plain() for one in made], ["shares.svg"]
    once = publish(PAGE.read_text(), plain, plots)
    assert once.startswith("# Benchmarks") and once.count(BEGIN) == once.count(END) == 1
    params = "weights 1:2, kernel_us 100, grid constant, sync True"
    assert f"| `ratio_error` | {params} | **1.5 %, missed** | <= 1 |  |" in once
    assert "| 99.1 % (99 to 99.2) | >= 98.5 | 99.9 |" in once
    assert "1 miss their must" in once
    assert once.count("](shares.svg)") == 1 and "ratio_error.svg" not in once
    assert publish(once, plain, plots) == once


def test_a_soak_goes_where_it_belongs():
    before = PAGE.read_text()
    made = [make_record("soak_failed", {"of": "writer", "operations": 10}, [1], "times").plain()]
    page = publish(before, made, marks=(SOAK_BEGIN, SOAK_END))
    assert page.count(SOAK_BEGIN) == page.count(SOAK_END) == 1
    assert page.partition(BEGIN)[2].partition(END)[0] == before.partition(BEGIN)[2].partition(END)[0]
    assert "| `soak_failed` | of writer, operations 10 | **1 times, missed** | <= 0 |" in page


def test_a_page_without_marks_is_refused():
    with pytest.raises(ValueError):
        publish("# Benchmarks\n", [])
