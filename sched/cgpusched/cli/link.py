"""The commands' end of cgpud's control socket: one JSON object a line each way (docs/commands.md)."""

from __future__ import annotations

import argparse
import json
import os
import socket
from typing import Any

from cgpusched.errors import UserError

DEFAULT_SOCKET = "/run/cgpud/control.sock"
TIMEOUT_SECONDS = 15.0
REPLY_LIMIT = 16 << 20
SUN_PATH = 107


class NoDaemon(UserError):
    """Nobody answers at the control socket."""

    exit_code = 3


class Refused(UserError):
    """The daemon's own one-line answer to a request it did not obey."""


class _Version(argparse.Action):
    """``--version``. Asks the package's metadata only when it is given: that costs as much as the rest of a start."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib import metadata

        try:
            version = metadata.version("cgpufs")
        except metadata.PackageNotFoundError:  # run from a checkout that was never installed
            version = "unknown"
        print(f"{parser.prog} {version}")
        parser.exit()


def add_common_arguments(parser: argparse.ArgumentParser) -> None:
    """``--version`` and ``--socket``."""
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.add_argument(
        "--socket",
        metavar="PATH",
        default=os.environ.get("CGPU_CONTROL") or DEFAULT_SOCKET,
        help=f"cgpud's control socket (default: CGPU_CONTROL of the environment, else {DEFAULT_SOCKET})",
    )


def _connect(sock: socket.socket, path: str) -> None:
    if len(os.fsencode(path)) <= SUN_PATH:
        sock.connect(path)
        return
    # Longer than a socket address holds: name the folder by a descriptor.
    folder = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock.connect(f"/proc/self/fd/{folder}/{os.path.basename(path)}")
    finally:
        os.close(folder)


def ask(path: str, do: str, **arguments: object) -> dict[str, Any]:
    """Sends one request and gives the daemon's answer; arguments that are None are left out.

    Raises NoDaemon when nobody answers, Refused with the daemon's reason when it says no.
    """
    request = {"do": do} | {key: value for key, value in arguments.items() if value is not None}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(TIMEOUT_SECONDS)
        try:
            _connect(sock, path)
            sock.sendall(json.dumps(request).encode() + b"\n")
            line = _read_line(sock)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            raise NoDaemon(f"cgpud is not running: nobody answers at {path}") from None
        except TimeoutError:
            raise NoDaemon(f"cgpud does not answer at {path}: gave up after {TIMEOUT_SECONDS:.0f} s") from None
        except OSError as error:
            raise NoDaemon(f"cannot talk to cgpud at {path}: {error.strerror or error}") from None
    try:
        reply = json.loads(line)
    except ValueError:
        reply = None
    if not isinstance(reply, dict):
        raise NoDaemon(f"what answers at {path} is not cgpud" if line else f"cgpud at {path} hung up without an answer")
    if not reply.get("ok"):
        raise Refused(str(reply.get("error", "cgpud refused without saying why")))
    return reply


def _read_line(sock: socket.socket) -> bytes:
    data = bytearray()
    while not data.endswith(b"\n"):
        piece = sock.recv(65536)
        if not piece:
            break
        data += piece
        if len(data) > REPLY_LIMIT:
            raise OSError(0, "the answer does not end")
    return bytes(data)
