"""What no program of ours does: knocks at one of cgpud's sockets, in COUNT ways that follow from SEED.

knock.py SOCKET KIND SEED COUNT FOLDER: KIND is gate, control or runtime; FOLDER is for bundles. Does not wait for
answers that may not come, and ends with 0.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import random
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from mutate import corpus, mutated  # noqa: E402

TARGETS = {"gate": ["hello"], "control": ["request"], "runtime": ["question", "state"]}
RIGHTS_MAX = 253
HEAD = 16
CREATE, HOOK = 1, 2


@contextlib.contextmanager
def descriptors(source: random.Random, bundle: Path | None) -> Iterator[list[int]]:
    """Some of any kind, in the number that goes with a message, or far too many."""
    made: list[int] = []

    def one() -> None:
        match source.randrange(9):
            case 0:
                made.append(os.open("/dev/null", os.O_RDWR))
            case 1:
                made.extend(os.pipe())
            case 2:
                made.append(os.memfd_create("x"))
            case 3:
                made.extend(end.detach() for end in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            case 4:
                made.append(os.eventfd(0))
            case 5:
                made.append(os.pidfd_open(os.getpid()))
            case 6:
                made.append(os.open("/", os.O_PATH))
            case 7:
                made.append(os.open("/proc/self/mem", os.O_RDONLY))
            case _:
                made.append(os.open(bundle or "/tmp", os.O_RDONLY | os.O_DIRECTORY))

    try:
        if bundle is not None and source.random() < 0.8:
            made.append(os.open(bundle, os.O_PATH | os.O_DIRECTORY))
        while len(made) < source.choice((0, 0, 0, 1, 2, 3, 40, RIGHTS_MAX)):
            one()
        yield made[:RIGHTS_MAX]
    finally:
        for fd in made:
            os.close(fd)


def message(source: random.Random, kind: str, folder: Path) -> tuple[bytes, Path | None]:
    """A message, and the bundle that it speaks of."""
    seeds = [seed for target in TARGETS[kind] for seed in corpus(target)]
    if source.random() < 0.1:
        return source.randbytes(source.randrange(300)), None
    if kind != "runtime" or source.random() < 0.4:
        return mutated(source, seeds), None
    bundle = folder / f"bundle{source.randrange(3)}"
    bundle.mkdir(exist_ok=True)
    configurations = corpus("oci")
    data = source.choice(configurations) if source.random() < 0.3 else mutated(source, configurations)
    (bundle / "config.json").write_bytes(data)
    ident = source.choice((b"c0ffee", b"c0ffee00" * 8, b"../../x", b"", b"\xff\xfe", b"a" * 200, b"c1", b"c2"))
    head = b"cgpr" + (1).to_bytes(4, "little")
    if source.random() < 0.6:
        return head + CREATE.to_bytes(4, "little") + bytes(4) + ident + b"\0" + os.fsencode(bundle) + b"\0", bundle
    state = {"ociVersion": "1.0.2", "id": ident.decode("latin-1"), "status": "creating",
             "pid": source.choice((os.getpid(), 2, 2**31 - 1, 0, -1, "1")), "bundle": str(bundle)}
    return head + HOOK.to_bytes(4, "little") + bytes(4) + json.dumps(state).encode(), bundle


def knock(path: str, kind: str, source: random.Random, folder: Path) -> None:
    style = socket.SOCK_STREAM if kind == "control" else socket.SOCK_SEQPACKET
    with socket.socket(socket.AF_UNIX, style) as sock:
        sock.settimeout(0.2)
        sock.connect(path)
        for _ in range(source.choice((0, 1, 1, 1, 2, 5))):
            data, bundle = message(source, kind, folder)
            if kind == "control" and source.random() < 0.9:
                data += b"\n"
            with descriptors(source, bundle) as fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
                sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
            if source.random() < 0.5:
                with contextlib.suppress(TimeoutError):
                    sock.recv(1 << 17)  # with no room for descriptors: what comes is dropped
        if source.random() < 0.2:
            sock.shutdown(source.choice((socket.SHUT_RD, socket.SHUT_WR, socket.SHUT_RDWR)))


def main() -> None:
    path, kind, seed, count, folder = sys.argv[1:]
    source = random.Random(f"{kind} {seed}")
    for _ in range(int(count)):
        with contextlib.suppress(OSError):  # it hung up on us: good
            knock(path, kind, source, Path(folder))


if __name__ == "__main__":
    main()
