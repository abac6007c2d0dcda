"""The grant protocol, explored: no interleaving breaks it, and whatever is taken out of it is missed.

CGPU_MODEL_LONG=1 explores larger scenes too: some minutes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from grant_model import FAULTS, Model, Scene, Violation

ROOT = Path(__file__).resolve().parents[2]
LONG = os.environ.get("CGPU_MODEL_LONG") == "1"

RACE = Scene(launches=(1, 1), granted=True, asks=False)
"""Two launchers of a process, one of which accepts, while the daemon closes: who submits when?"""
WAKE = Scene(launches=(1,), idles=1)
"""One launcher that asks, is closed on, goes idle and comes back: does it ever wait for nobody?"""
ASK = Scene(launches=(1,))
SHOWS = {
    "no second look after close": WAKE, "sleeps at an open gate": WAKE, "sleeps without comparing": ASK,
    "grants without a wake-up": ASK, "asks without a bell": ASK,
}  # fmt: skip
"""The scene in which a fault shows, where it is not the first."""
SUBMITS, OVERLAPS, HANGS = "A submits while B", "B has the device while", "it never ends"
WHAT = {
    "no look after accept": HANGS, "acknowledges before it has drained": OVERLAPS, "rings before it says so": HANGS,
    "sleeps without comparing": HANGS, "sleeps at an open gate": HANGS, "grants without a wake-up": HANGS,
    "closes without a ring": HANGS, "asks without a bell": HANGS,
}  # fmt: skip
"""What comes of it; else that A submits in B's turn."""


@pytest.mark.parametrize("scene", [
    RACE, WAKE,
    Scene(launches=(2,)),
    Scene(launches=(1,), early=True),
    *([Scene(launches=(1, 1)), Scene(launches=(2,), rivals=2, idles=1), Scene(launches=(1,), idles=2, early=True)]
      if LONG else []),
], ids=str)  # fmt: skip
@pytest.mark.timeout(1800 if LONG else 120)
def test_holds_in_every_interleaving(scene: Scene) -> None:
    assert Model(scene).explore() > 10_000, "the scene is as large as it was"


@pytest.mark.parametrize("fault", FAULTS)
def test_every_part_is_needed(fault: str) -> None:
    scene = SHOWS.get(fault, RACE)
    with pytest.raises(Violation, match=WHAT.get(fault, SUBMITS)):
        Model(Scene(**{**vars(scene), "fault": fault})).explore()


ORDER = {
    "csrc/client/client.h": [
        ("gate_enter(", ["store_relaxed(&t->in, 1)", "compiler_barrier()", "load_relaxed(t->word)"])],
    "csrc/client/waiting.c": [
        ("accept_word(", ["slot->drained, 0", "slot->idle, 0", "slot->acked, 0", "slot->opened, word",
                          "fence_seq_cst()", "load_relaxed(&g->ctl->grant) == word", "&g->state, GATE_HELD",
                          "&g->accept, word"]),
        ("gate_try_open(", ["hook_lock_take", "g->state == GATE_CLOSING", "accept_word(", "hook_lock_drop",
                            "fence_seq_cst()", "load_relaxed(&g->ctl->grant) != word", "gate_kick()"]),
        ("gate_wait(", ["load_acquire(&g->ctl->grant)", "gate_try_open(g)", "fetch_add(&slot->demand, 1)",
                        "is_leaving(g)", "gate_bell(g)", "g->refused", "FUTEX_WAIT"]),
        ("gate_let_go(", ["hook_lock_take", "&g->accept, CGPU_ACCEPT_NONE", "&g->state, GATE_CLOSING",
                          "hook_lock_drop"]),
    ],
    "csrc/client/agent.c": [
        ("step_closing(", ["SYS_membarrier", "marks_clear(g)", "&g->state, GATE_DRAINING"]),
        ("step_draining(", ["streams_drained(", "&slot->acked, word", "&slot->drained, word", "&g->state, GATE_CLOSED",
                            "hook_lock_drop", "gate_bell(g)"]),
    ],
    "csrc/gate/pages.c": [
        ("pages_look(", ["&s->demand", "&s->drained", "&s->acked", "&s->opened"]),
        ("pages_grant(", ["&p->ctl->grant", "FUTEX_WAKE"]),
        ("pages_close(", ["&p->ctl->grant", "fence_seq_cst()", "ring_holders("]),
    ],
}  # fmt: skip
"""The steps of the model in the code's own words."""


@pytest.mark.parametrize(("path", "function", "steps"), [
    (path, function, steps) for path, functions in ORDER.items() for function, steps in functions
])  # fmt: skip
def test_the_code_takes_these_steps_in_this_order(path: str, function: str, steps: list[str]) -> None:
    """No proof that the model is the code's, but whoever changes the one is led to the other."""
    text = (ROOT / path).read_text()
    found = re.search(rf"^[^\n;]*\b{re.escape(function)}[^;{{]*\n{{\n(.*?)^}}", text, re.DOTALL | re.MULTILINE)
    assert found, f"{function} is not in {path}"
    at = 0
    for step in steps:
        at = found[1].find(step, at)
        assert at >= 0, f"{path}, {function}...): {step} does not come where the model has it"
        at += len(step)
