"""Values in memory that other processes read meanwhile."""

import mmap
import struct


def put(memory: mmap.mmap, offset: int, form: str, *values: int) -> None:
    """Like struct.pack_into(), which fills the place with zeros first: a reader would find those for a moment."""
    data = struct.pack(form, *values)
    memory[offset : offset + len(data)] = data
