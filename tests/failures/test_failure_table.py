"""docs/architecture.md, "What happens when … dies": each row names a test, and each of those is there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)?(?:::(\w+))?`")


def test_every_row_has_its_test() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    section = text[text.index("## What happens when") : text.index("## How the daemon is outlived")]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    for who, *_, tests in rows:
        named = [match for match in NAMED.findall(tests) if any(match)]
        assert named and named[0][0], who
        path = ""
        for file, name in named:
            path = file or path
            assert f"def {name}(" in (ROOT / path).read_text(), (who, path, name)
