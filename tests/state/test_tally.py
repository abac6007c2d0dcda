"""What was counted in predecessors' times: there and back, added up, and what is no good."""

import json
from pathlib import Path
from typing import Any

import pytest

from cgpusched.daemon import tally
from cgpusched.daemon.tally import GpuTotals, Tally, TallyFile, Totals

MOST = (1 << 63) - 1
ONE = Totals(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)


def test_there_and_back(tmp_path: Path) -> None:
    file = TallyFile(tmp_path, "boot-1")
    assert file.load({"a": 1}) == Tally(), "nothing was counted yet"
    file.save(Tally({("a", "u"): ONE, ("gone", "u"): ONE}, {"u": GpuTotals(1, 2)}))
    assert file.path.stat().st_mode & 0o777 == 0o600
    found = TallyFile(tmp_path, "boot-1").load({"a": 1})
    assert found == Tally({("a", "u"): ONE}, {"u": GpuTotals(1, 2)})
    assert found.of("a", "u") == ONE and found.of("b", "u") == Totals() and found.of_gpu("v") == GpuTotals()
    found.drop("a", "u")
    found.drop("a", "u")
    assert found.of("a", "u") == Totals()
    assert TallyFile(tmp_path, "boot-2").load({"a": 1}) == Tally(), "counted in another boot"


def test_what_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    file, some = TallyFile(tmp_path, "boot"), Tally({("a", "u"): ONE})
    file.save(some)
    before = file.path.stat().st_ino
    file.save(some)
    assert file.path.stat().st_ino == before
    file.save(Tally({("a", "u"): ONE.plus(ONE)}))
    assert file.path.stat().st_ino != before


def test_what_tenants_scribble_does_not_grow_without_end() -> None:
    sum_ = Totals(launches=2**64 - 1, ungated=MOST).plus(Totals(launches=2**64 - 1, ungated=1))
    assert (sum_.launches, sum_.ungated) == (MOST, MOST)
    assert Tally.load(Tally({("a", "u"): sum_}).dump("b"), "b").of("a", "u") == sum_


@pytest.mark.parametrize("change", [
    {"version": 2}, {"version": None}, {"boot": None, "version": "1"}, {"instances": 7}, {"instances": [7]},
    {"instances": [{"id": "a"}]}, {"instances": [{"id": "a", "gpu": "u", "turns": -1}]},
    {"instances": [{"id": "a", "gpu": "u", "turns": True}]}, {"instances": [{"id": "a", "gpu": "u", "turns": 1 << 63}]},
    {"gpus": []}, {"gpus": {"u": 1}},
])  # fmt: skip
def test_what_is_none_costs_the_counts_and_one_line(
    tmp_path: Path, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    whole = json.loads(Tally({("a", "u"): ONE}).dump("boot"))
    file = TallyFile(tmp_path, "boot")
    file.path.write_text(json.dumps({**whole, **change}))
    assert file.load({"a": 1}) == Tally()
    assert [record.message.startswith("counters begin at 0") for record in caplog.records] == [True]


def test_a_full_disk_is_told_and_survived(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TallyFile(tmp_path / "nowhere", "boot")
    for turns in range(100):
        file.save(Tally({("a", "u"): Totals(turns=turns)}))
    assert len(caplog.records) == 10 and all("counters not stored" in record.message for record in caplog.records)
    assert tally.VERSION == 1
