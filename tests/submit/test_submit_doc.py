"""docs/submission.md says of every call of these families whether it passes the gate, and is right."""

from __future__ import annotations

import csv
import itertools
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What can put work into a stream, by name; the rest of the API makes objects and asks questions.
FAMILIES = re.compile(
    r"cu(Launch|Memcpy|Memset|Mem\w*Async|Graph(Launch|Upload|InstantiateWithParams|ics\w*MapResources)|"
    r"Stream(Wait|Write|BatchMemOp|AddCallback|AttachMem)|Event(Record)|(Ctx|GreenCtx)(Record|Wait)Event|"
    r"(Signal|Wait)ExternalSemaphores)")


def expand(text: str) -> list[str]:
    parts = [part.split(",") if i % 2 else [part] for i, part in enumerate(re.split(r"\{([^}]*)\}", text))]
    return ["".join(choice) for choice in itertools.product(*parts)]


def section(title: str) -> set[str]:
    text = (ROOT / "docs/submission.md").read_text().split(f"## {title}\n")[1].split("\n## ")[0]
    names = [name for row in re.findall(r"^\|([^|]*)\|", text, re.M) for one in re.findall(r"`(cu[^`]*)`", row)
             for name in expand(one)]
    assert len(names) == len(set(names)), f"twice: {[name for name in names if names.count(name) > 1]}"
    return set(names)


def gated() -> set[str]:
    """Names whose wrapper enters the gate: those of submit.c."""
    include = [f"-I{ROOT}/csrc/{part}" for part in ("abi", "client", "hook")]
    done = subprocess.run(["gcc", "-E", "-P", "-std=gnu11", *include, str(ROOT / "csrc/hook/submit.c")],
                          capture_output=True, text=True, check=True)
    return set(re.findall(r"static CUresult wrap_(\w+)", done.stdout))


def exports() -> set[str]:
    with (ROOT / "csrc/tables/cuda_api.tsv").open() as file:
        return {row["export"] for row in csv.DictReader(file, delimiter="\t") if row["flags"] and row["export"] != "-"}


def test_what_the_table_says_passes_is_what_is_wrapped() -> None:
    assert section("Passes the gate") == gated()


def test_every_submitting_name_is_in_one_of_the_tables() -> None:
    names = {name for name in exports() if FAMILIES.match(name) and "Node" not in name}
    assert names - section("Passes the gate") - section("Passes ungated") == set()
    assert (section("Passes the gate") | section("Passes ungated")) - exports() == set()
    assert section("Passes the gate") & section("Passes ungated") == set()
