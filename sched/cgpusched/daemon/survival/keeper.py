"""The keeper: a tiny process that holds descriptors while no daemon does, where there is no systemd to do so.

``python3 -I -S keeper.py FOLDER SECONDS``, with one end of a SOCK_SEQPACKET pair as standard input, which is the daemon
that started it; others come by ``FOLDER/keeper.sock``, which root alone may connect to. It imports nothing of ours, so
that it stays small, and is never replaced: a new daemon speaks this same protocol with it. A message is one of

    keep NAME   with a descriptor: hold it, in the place of another of that name
    drop NAME   let it go
    give        answered by "have NAME" with a descriptor, for each that is held, and then by "done"
    end         let all go, and end

It ends as well when no daemon is there and no mount that it holds is either (somebody unmounted them), or no daemon has
come for SECONDS: requests to a mount that nobody answers wait for ever, while those to one that nobody holds fail.
"""

import array
import os
import select
import socket
import sys
import time

NAME = "keeper.sock"
MESSAGE_MAX = 300
HELD_MAX = 64
_FD = array.array("i").itemsize


class Keeper:
    def __init__(self, folder: str, patience: float, first: socket.socket) -> None:
        self._path = os.path.join(folder, NAME)
        self._patience = patience
        self._held: dict[str, int] = {}
        self._alone_since = time.monotonic()
        self._poll = select.poll()
        self._connections: dict[int, socket.socket] = {}
        self._listener = self._listen()
        self._poll.register(self._listener, select.POLLIN)
        self._welcome(first)

    def _listen(self) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folder = os.open(os.path.dirname(self._path), os.O_PATH)  # its path may be longer than an address holds
        fresh = f"{self._path}.{os.getpid()}"
        try:
            listener.bind(f"/proc/self/fd/{folder}/{os.path.basename(fresh)}")
            os.chmod(fresh, 0o600)
            listener.listen(8)
            os.rename(fresh, self._path)
        finally:
            os.close(folder)
        self._socket = os.lstat(self._path).st_ino
        return listener

    def _welcome(self, sock: socket.socket) -> None:
        self._connections[sock.fileno()] = sock
        self._poll.register(sock, select.POLLIN)

    def run(self) -> None:
        try:
            while self._is_needed():
                left = None if self._connections else max(0.0, self._patience - self._alone()) * 1000
                for fd, event in self._poll.poll(left):
                    self._look(fd, event)
        finally:
            try:
                if os.lstat(self._path).st_ino == self._socket:  # another keeper may have taken the name
                    os.unlink(self._path)
            except OSError:
                pass

    def _is_needed(self) -> bool:
        if self._connections:
            return True
        return any(map(_is_mount, self._held.values())) and self._alone() < self._patience

    def _alone(self) -> float:
        return time.monotonic() - self._alone_since

    def _look(self, fd: int, event: int) -> None:
        if fd == self._listener.fileno():
            self._welcome(self._listener.accept()[0])
        elif fd in self._connections:
            self._hear(fd)
        elif event & select.POLLERR:  # a mount has gone
            for name in [name for name, held in self._held.items() if held == fd]:
                self._drop(name)

    def _hear(self, fd: int) -> None:
        if not self._listen_to(self._connections[fd]):
            self._poll.unregister(fd)
            self._connections.pop(fd).close()
            self._alone_since = time.monotonic()

    def _listen_to(self, sock: socket.socket) -> bool:
        """False: this connection has ended."""
        try:
            data, ancillary, _, _ = sock.recvmsg(MESSAGE_MAX, socket.CMSG_SPACE(_FD * 4), socket.MSG_CMSG_CLOEXEC)
        except OSError:
            return False
        fds = array.array("i")
        for level, kind, content in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(content[: len(content) - len(content) % _FD])
        verb, _, name = data.decode("ascii", "replace").partition(" ")
        if verb == "keep" and fds and (name in self._held or len(self._held) < HELD_MAX):
            self._keep(name, fds.pop())
        elif verb == "drop" and name in self._held:
            self._drop(name)
        elif verb == "give":
            self._give(sock)
        elif verb == "end":
            sys.exit(0)
        for fd in fds:
            os.close(fd)
        return bool(data)

    def _keep(self, name: str, fd: int) -> None:
        if name in self._held:
            self._drop(name)
        self._held[name] = fd
        if _is_mount(fd):
            self._poll.register(fd, 0)  # tells its end (POLLERR), never that there is something to read

    def _drop(self, name: str) -> None:
        fd = self._held.pop(name)
        try:
            self._poll.unregister(fd)
        except KeyError:
            pass
        os.close(fd)

    def _give(self, sock: socket.socket) -> None:
        for other in list(self._connections):  # what a daemon that died said last counts too
            while other in self._connections and other != sock.fileno() and select.select([other], [], [], 0)[0]:
                self._hear(other)
        try:
            for name, fd in self._held.items():
                rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))
                sock.sendmsg([f"have {name}".encode()], [rights])
            sock.send(b"done")
        except OSError:  # it ended meanwhile
            pass


def _is_mount(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}") == "/dev/fuse"


def main() -> None:
    keeper = Keeper(sys.argv[1], float(sys.argv[2]), socket.socket(fileno=os.dup(0)))  # to be found by then
    if os.fork():
        os._exit(0)  # so that the daemon has no child to wait for, also one that another program has become
    for path, text in (("comm", "cgpud-keeper"), ("oom_score_adj", "-900")):
        try:
            with open(f"/proc/self/{path}", "w") as file:
                file.write(text)
        except OSError:
            pass
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:  # from a start, which goes before others (haste.py)
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    keeper.run()


if __name__ == "__main__":
    main()
