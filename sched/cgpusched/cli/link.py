"""The commands' end of cgpud's control socket: one JSON object a line each way (docs/commands.md)."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

from cgpusched.errors import UserError
from cgpusched.sockets import address

DEFAULT_SOCKET = "/run/cgpud/control.sock"
TIMEOUT_SECONDS = 15.0
REPLY_LIMIT = 16 << 20


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
    """Waits where the daemon's queue is full: a socket with a timeout would be told EAGAIN instead, at once."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(TIMEOUT_SECONDS), 0))
    with address(path) as name:
        sock.connect(name)


def ask(path: str, do: str, **arguments: object) -> dict[str, Any]:
    """Sends one request and gives the daemon's answer; arguments that are None are left out.

    Raises NoDaemon when nobody answers, Refused with the daemon's reason when it says no.
    """
    request = {"do": do} | {key: value for key, value in arguments.items() if value is not None}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            _connect(sock, path)
            sock.settimeout(TIMEOUT_SECONDS)
            # Where it hangs up on us before it has read that, its reason is there to be read all the same.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                sock.sendall(json.dumps(request).encode() + b"\n")
            line = _read_line(sock)
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            raise NoDaemon(f"cgpud is not running: nobody answers at {path}") from None
        except (TimeoutError, BlockingIOError):
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


def exit_status(command: str, body: Callable[[], int], failed: int | None = None) -> int:
    """Runs a command's body and gives its exit status; what goes wrong is one line on stderr.

    ``failed``: the status for that instead of the error's own.
    """
    try:
        status = body()
        if sys.stdout is not None:  # it was closed before we came
            sys.stdout.flush()
        return status
    except UserError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return error.exit_code if failed is None else failed
    except BrokenPipeError:  # the reader of our output went away, as `cgpuctl list | head -1` does
        _drop_output()
        return 0
    except OSError as error:
        print(f"{command}: cannot write: {error.strerror or error}", file=sys.stderr)
        _drop_output()
        return 1 if failed is None else failed
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def _drop_output() -> None:
    """What is still buffered must not fail again when Python ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
