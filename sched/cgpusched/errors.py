"""Errors that are a user's business: one clear line, never a traceback."""

import errno


class UserError(Exception):
    """A mistake in what was asked for. ``str()`` is one line that names the value and what is allowed."""

    exit_code = 1


class CommandError(UserError):
    """A command that was refused; nothing changed.

    ``errno`` is what a write to the tree fails with (EINVAL, EBUSY, ENOSPC, ENOENT, EEXIST, EPERM).
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.errno = code

    @property
    def name(self) -> str:
        """The symbolic name of ``errno``, as logs show it."""
        return errno.errorcode.get(self.errno, str(self.errno))
