"""/etc/ld.so.preload of a container with our library in it, for where a copy of the driver cannot be covered.

glibc's loader reads that file in every program it starts: names of libraries, between them white space or colons, and
comments from # to the line's end (ld.so(8)). Ours comes first, so that another that stands before dlopen() comes after.
"""

from __future__ import annotations

FILE = "/etc/ld.so.preload"
LIBRARY = "libcgpu-preload.so.1"
SIZE_MAX = 65536
"""Bytes of an image's own file; a bigger one is left alone."""


def merged(library: str, own: bytes) -> bytes:
    """The file with ``library``, a path, before what the image has in it, which stays as it is, byte for byte.

    Ours already there, first, as a program that edits a merged file may leave it: nothing is added.
    """
    line = library.encode() + b"\n"
    return own if own.startswith(line) else line + own
