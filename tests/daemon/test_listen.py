"""Accepting: what runs out, what breaks, and how many at a time."""

import errno
from typing import Any

import pytest
import trio

from cgpusched.daemon.server.listen import accept_forever


class Listener:
    """Gives what it was told to: an error, or a connection (None: nobody comes any more)."""

    def __init__(self, *script: OSError | str) -> None:
        self.script = list(script)

    async def accept(self) -> tuple[Any, None]:
        await trio.lowlevel.checkpoint()
        if not self.script:
            await trio.sleep_forever()
        step = self.script.pop(0)
        if isinstance(step, OSError):
            raise step
        return Connection(step), None


class Connection:
    def __init__(self, name: str) -> None:
        self.name, self.closed = name, False

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.ECONNABORTED])
async def test_running_out_is_survived_and_keeps_its_place(
    code: int, nursery: trio.Nursery, autojump_clock: Any, caplog: Any
) -> None:
    served: list[str] = []

    async def serve(connection: Any) -> None:
        served.append(connection.name)

    listener, room = Listener(OSError(code, "no"), OSError(code, "no"), "one"), trio.CapacityLimiter(1)
    nursery.start_soon(accept_forever, listener, nursery, room, serve)
    await trio.sleep(5)
    assert served == ["one"]
    assert ("accept failed" in caplog.text) is (code != errno.ECONNABORTED)
    nursery.cancel_scope.cancel()


async def test_other_errors_end_the_service() -> None:
    with pytest.raises(OSError, match="broken"):
        await accept_forever(Listener(OSError(errno.EBADF, "broken")), None, trio.CapacityLimiter(1), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("failure", [OSError(errno.EPIPE, "gone"), RuntimeError("bug")])
async def test_a_connection_that_fails_makes_room(
    failure: Exception, nursery: trio.Nursery, autojump_clock: Any
) -> None:
    served: list[Connection] = []

    async def serve(connection: Any) -> None:
        served.append(connection)
        raise failure

    listener, room = Listener("one", "two"), trio.CapacityLimiter(1)
    nursery.start_soon(accept_forever, listener, nursery, room, serve)
    await trio.sleep(5)
    assert [connection.name for connection in served] == ["one", "two"]
    assert all(connection.closed for connection in served)
    nursery.cancel_scope.cancel()
