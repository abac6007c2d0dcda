"""What a program gets for nvidia-smi's private table, beside what the library (argument: its path) gives; as JSON."""

from __future__ import annotations

import ctypes
import json
import sys

ID = bytes.fromhex("c4fe3e6cc98f6c4ea327ee696e12f7c4")
FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


def table(library: ctypes.CDLL, id_: bytes) -> tuple[int, list[int]]:
    """The answer, and the table's words; word 0 is its size in bytes."""
    found = ctypes.POINTER(ctypes.c_uint64)()
    result = library.nvmlInternalGetExportTable(ctypes.byref(found), id_)
    return result, found[:found[0] // 8] if result == 0 else []


ours, real = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.CDLL(sys.argv[1])
ours.nvmlInit_v2()
result, words = table(ours, ID)
theirs = table(real, ID)[1]
again = table(ours, ID)[1]
changed = [i for i, word in enumerate(words) if word != theirs[i]]
counts = []
for i in range(213, 216):
    count, room = ctypes.c_uint(250), ctypes.create_string_buffer(250 * 4128)
    if i in changed:
        counts.append([FUNCTION(words[i])(None, ctypes.addressof(count), ctypes.addressof(room)), count.value])
print(json.dumps({"result": result, "words": len(words), "same_length": len(words) == len(theirs), "changed": changed,
                  "again": again == words, "counts": counts, "other": table(ours, bytes(16))[0],
                  "other_real": table(real, bytes(16))[0]}))
