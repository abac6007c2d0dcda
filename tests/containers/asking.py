"""Asks cgpud as cgpu-runtime does, says what came as a JSON line, and lives on until its input ends.

asking.py SOCKET create ID BUNDLE [--parent] | hook STATE | delete ID | raw HEX
asking.py FOLDER attach: joins an instance instead, as a program in it does, and ends.
"""

import array
import json
import os
import socket
import struct
import sys

HEAD = struct.Struct("<IIiI")
MAGIC, VERSION = 0x72706763, 1
HELLO = struct.pack("<IIII48x", 0x75706763, 1, 4242, 0)


def question(words: list[str]) -> tuple[bytes, list[int]]:
    match words:
        case ["create", id, bundle, *more]:
            fds = [os.open(bundle, os.O_PATH | os.O_DIRECTORY)]
            if more:
                fds.append(os.pidfd_open(os.getppid()) if more == ["--parent"] else os.open("/dev/null", os.O_RDONLY))
            return HEAD.pack(MAGIC, VERSION, 1, 0) + f"{id}\0{bundle}\0".encode(), fds
        case ["hook", state]:
            return HEAD.pack(MAGIC, VERSION, 2, 0) + state.encode(), []
        case ["delete", id]:
            return HEAD.pack(MAGIC, VERSION, 3, 0) + f"{id}\0".encode(), []
        case ["raw", text]:
            return bytes.fromhex(text), []
    raise ValueError(words)


def attach(folder: str) -> None:
    os.chdir(folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect("gate.sock")
        sock.send(HELLO)
        welcome = sock.recv(65536)
    (error,) = struct.unpack_from("<i", welcome, 8)
    print(json.dumps({"error": error, "text": welcome[152:280].split(b"\0")[0].decode()}))


def main() -> None:
    if sys.argv[2:] == ["attach"]:
        attach(sys.argv[1])
        return
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(sys.argv[1])
    message, fds = question(sys.argv[2:])
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([message], rights)
    reply, ancillary, _, _ = sock.recvmsg(1 << 17, 64)
    spec = None
    for _, _, content in ancillary:
        with open(struct.unpack("i", content)[0], "rb") as file:
            spec = json.loads(file.read())
    if not reply:
        status, text = 1 << 30, "closed"
    else:
        magic, version, status, _ = HEAD.unpack_from(reply)
        assert (magic, version) == (MAGIC, VERSION)
        text = reply[HEAD.size :].decode()
    print(json.dumps({"status": status, "text": text, "spec": spec}), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
