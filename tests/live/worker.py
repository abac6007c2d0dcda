"""Uses a tree without pause until its input ends, then says what came of it: ``worker.py read|write TREE``.

``read``: a descriptor held open, open+read+close, and a listing. ``write``: a value, and whether it is what is read
then.
Prints ``{"count": ..., "failed": [...], "longest": seconds}``.
"""

import json
import os
import sys
import threading
import time


def read(tree: str) -> None:
    held = read.held = getattr(read, "held", None) or os.open(f"{tree}/0/policy", os.O_RDONLY)  # type: ignore[attr-defined]
    assert os.pread(held, 9, 0)[:1].isdigit()
    with open(f"{tree}/version") as file:
        assert file.read().count(".") == 2
    assert {"policy", "max_inst"} <= set(os.listdir(f"{tree}/0"))


def write(tree: str) -> None:
    write.value = value = getattr(write, "value", 1) + 1  # type: ignore[attr-defined]
    fd = os.open(f"{tree}/default_memsize", os.O_RDWR)
    try:
        os.write(fd, b"%d" % value)
        found = os.pread(fd, 30, 0)
    finally:
        os.close(fd)
    assert found == b"%d\n" % value, f"wrote {value}, read {found!r}"


def main(what: str, tree: str) -> None:
    count, failed, longest = 0, [], 0.0
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.is_set():
        began = time.monotonic()
        try:
            {"read": read, "write": write}[what](tree)
        except (OSError, AssertionError) as error:
            failed.append(repr(error))
        longest = max(longest, time.monotonic() - began)
        count += 1
        time.sleep(0.001)
    print(json.dumps({"count": count, "failed": failed[:5], "longest": longest}))


if __name__ == "__main__":
    main(*sys.argv[1:])
