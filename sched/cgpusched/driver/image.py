"""Writes the bytes of a proxy: an x86-64 shared object with the real library's names and nothing behind them but jumps.

A node has no compiler, so the object is laid out here. Addresses equal file offsets throughout, three segments::

    R    headers, build-id, hash tables, .dynsym .dynstr, versions, .rela.dyn, .rodata, .eh_frame
    RX   .text: the constructor, two answers for a call that comes before it ran, one stub an export
    RW   .init_array .dynamic .data.rel.ro .got   (read-only after relocation)  |  .data: the slots

A stub is ``endbr64; jmp *slot(%rip)``: it touches no register, no flag and no stack, so every calling convention
passes. The constructor tail-calls ``cgpu_proxy_bind(&proxy)`` of libcgpu-hook.so.1, which fills the slots. Until
then a slot answers "not initialized" (and nvmlErrorString, which returns text, a text).

Exported variables are left out, knowingly: a copy here would be a second variable. In the real drivers these are the 20
``cudbg*`` flags of cuda-gdb, which no public header declares; a debugger finds them in the real library, loaded too.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from enum import IntEnum

from cgpusched.driver.elf import VER_FLG_BASE, VERSYM_HIDDEN, Library, Version

HOOK = "libcgpu-hook.so.1"
# Where only the proxies are mounted over the driver's files the hook is not beside them: a container has it here.
RUNPATH = "$ORIGIN:/usr/local/cgpu/lib"
BIND = "cgpu_proxy_bind"
ABI = 1  # CGPU_ABI_VERSION
PAGE = 0x1000
EHDR, PHDR, SEGMENTS = 64, 56, 8
STUB = 16
# .text: the constructor, what answers a code, what answers a text, then the stubs
ANSWER, TEXT_ANSWER, FIRST_STUB = 32, 48, 64
PROXY_SIZE = 40  # struct cgpu_proxy
SHF_WRITE, SHF_ALLOC, SHF_EXEC = 1, 2, 4
R_RELATIVE, R_GLOB_DAT = 8, 6
ENDBR = b"\xf3\x0f\x1e\xfa"


class Kind(IntEnum):
    """``enum hook_lib`` of hook.h."""

    CUDA = 0
    NVML = 1


# What a function answers before the constructor ran: CUDA_ERROR_NOT_INITIALIZED, NVML_ERROR_UNINITIALIZED.
UNBOUND = {Kind.CUDA: 3, Kind.NVML: 1}
TEXT_FUNCTIONS = {"nvmlErrorString"}
TEXT = b"driver not loaded yet\0"


@dataclass
class _Section:
    name: str
    kind: int
    flags: int
    data: bytes
    align: int = 8
    link: str = ""
    info: int = 0
    entry: int = 0
    at: int = 0


@dataclass
class _Strings:
    data: bytearray = field(default_factory=lambda: bytearray(1))
    known: dict[str, int] = field(default_factory=lambda: {"": 0})

    def add(self, text: str) -> int:
        if text not in self.known:
            self.known[text] = len(self.data)
            self.data += text.encode() + b"\0"
        return self.known[text]


def _sysv_hash(name: str) -> int:
    value = 0
    for byte in name.encode():
        value = (value << 4) + byte
        value = (value ^ (value & 0xF0000000) >> 24) & 0x0FFFFFFF
    return value


def _gnu_hash(name: str) -> int:
    value = 5381
    for byte in name.encode():
        value = (value * 33 + byte) & 0xFFFFFFFF
    return value


@dataclass(frozen=True)
class _Entry:
    """One export of the proxy; ``label`` is what cgpu_proxy_bind() looks up: ``name``, or ``name@version``."""

    label: str
    name: str
    version: int  # index into the version definitions, with VERSYM_HIDDEN
    weak: bool


def _entries(library: Library, versions: list[Version]) -> list[_Entry]:
    """Sorted by label, bytewise: cgpu_proxy_bind() searches by halves."""
    number = {version.name: index for index, version in reversed(list(enumerate(versions, 1)))}
    entries = []
    for export in library.functions:
        label = f"{export.name}@{export.version}" if export.hidden else export.name
        index = number[export.version] if export.version else 1
        entries.append(_Entry(label, export.name, index | (VERSYM_HIDDEN if export.hidden else 0), export.weak))
    return sorted(entries, key=lambda entry: entry.label.encode())


def _gnu_hash_table(names: list[str], nbuckets: int, first: int) -> bytes:
    """``names`` must be sorted by hash modulo ``nbuckets``; ``first`` is the index of the first one in .dynsym."""
    hashes = [_gnu_hash(name) for name in names]
    shift, words = 6, 1
    while words * 64 < 8 * len(names):
        words *= 2
    bloom = [0] * words
    buckets, chains = [0] * nbuckets, []
    for index, value in enumerate(hashes):
        bloom[value // 64 % words] |= 1 << value % 64 | 1 << (value >> shift) % 64
        if not buckets[value % nbuckets]:
            buckets[value % nbuckets] = first + index
        last = index + 1 == len(hashes) or hashes[index + 1] % nbuckets != value % nbuckets
        chains.append(value & ~1 | last)
    layout = f"<4I{words}Q{nbuckets}I{len(chains)}I"
    return struct.pack(layout, nbuckets, first, words, shift, *bloom, *buckets, *chains)


def _hash_table(names: list[str]) -> bytes:
    """The old table, over all of .dynsym (``names[0]`` is the null symbol)."""
    nbuckets = max(1, len(names) // 2)
    buckets, chains = [0] * nbuckets, [0] * len(names)
    for index in range(1, len(names)):
        bucket = _sysv_hash(names[index]) % nbuckets
        chains[index], buckets[bucket] = buckets[bucket], index
    return struct.pack(f"<2I{nbuckets}I{len(names)}I", nbuckets, len(names), *buckets, *chains)


def _version_definitions(versions: list[Version], strings: _Strings) -> bytes:
    out = b""
    for index, version in enumerate(versions, 1):
        names = [version.name, *version.parents]
        size = 20 + 8 * len(names)
        out += struct.pack("<HHHHIII", 1, version.flags, index, len(names), _sysv_hash(version.name), 20,
                           size if index < len(versions) else 0)
        for place, name in enumerate(names, 1):
            out += struct.pack("<II", strings.add(name), 8 if place < len(names) else 0)
    return out


def render(library: Library, kind: Kind, soname: str, runpath: str = RUNPATH) -> bytes:
    """The proxy of ``library``, which names itself ``soname`` and finds the hook in the folders ``runpath``.

    The same input gives the same bytes.
    """
    image = _Image(library, kind, soname, runpath)
    image.place()
    image.fill_code()
    image.fill_symbols()
    image.fill_data()
    image.fill_unwinding()
    image.fill_dynamic()
    return image.finish()


class _Image:
    """The sections first get their sizes, then their places, then what depends on places is filled in."""

    def __init__(self, library: Library, kind: Kind, soname: str, runpath: str) -> None:
        versions = list(library.versions)
        if versions and not versions[0].flags & VER_FLG_BASE:
            versions.insert(0, Version(soname, VER_FLG_BASE))
        self.kind = kind
        self.path = str(library.path).encode() + b"\0"
        self.versions = versions
        self.entries = _entries(library, versions)
        self.count = len(self.entries)
        nbuckets = max(1, self.count // 2)
        # .dynsym in the order the GNU hash wants; the label settles ties
        self.order = sorted(range(self.count), key=lambda i: (_gnu_hash(self.entries[i].name) % nbuckets,
                                                              self.entries[i].label))
        names = [self.entries[i].name for i in self.order]
        strings = _Strings()
        self.names_at = [strings.add(name) for name in [BIND, *names]]
        self.labels_at = [strings.add(entry.label) for entry in self.entries]
        self.needed, self.soname, self.runpath = strings.add(HOOK), strings.add(soname), strings.add(runpath)
        definitions = _version_definitions(versions, strings)
        versym = struct.pack(f"<{self.count + 2}H", 0, 1, *(self.entries[i].version for i in self.order))

        write, code = SHF_ALLOC | SHF_WRITE, SHF_ALLOC | SHF_EXEC
        sections = [
            _Section(".note.gnu.build-id", 7, SHF_ALLOC, bytes(36), 4),
            _Section(".gnu.hash", 0x6FFFFFF6, SHF_ALLOC, _gnu_hash_table(names, nbuckets, 2), 8, ".dynsym"),
            _Section(".hash", 5, SHF_ALLOC, _hash_table(["", BIND, *names]), 8, ".dynsym", entry=4),
            _Section(".dynsym", 11, SHF_ALLOC, bytes(24 * (self.count + 2)), 8, ".dynstr", info=1, entry=24),
            _Section(".dynstr", 3, SHF_ALLOC, bytes(strings.data), 1),
            _Section(".gnu.version", 0x6FFFFFFF, SHF_ALLOC, versym, 2, ".dynsym", entry=2),
            _Section(".gnu.version_d", 0x6FFFFFFD, SHF_ALLOC, definitions, 8, ".dynstr", info=len(versions)),
            _Section(".rela.dyn", 4, SHF_ALLOC, bytes(24 * (5 + 2 * self.count)), 8, ".dynsym", entry=24),
            _Section(".rodata", 1, SHF_ALLOC, self.path + TEXT, 1),
            _Section(".eh_frame_hdr", 1, SHF_ALLOC, bytes(20), 4),
            _Section(".eh_frame", 1, SHF_ALLOC, bytes(24 + 24 + 4), 8),
            _Section(".text", 1, code, bytes(FIRST_STUB + STUB * self.count), PAGE),
            _Section(".init_array", 14, write, bytes(8), PAGE, entry=8),
            _Section(".dynamic", 6, write, bytes(16 * 22), 8, ".dynstr", entry=16),
            _Section(".data.rel.ro", 1, write, bytes(PROXY_SIZE + 8 * self.count), 8),
            _Section(".got", 1, write, bytes(8), 8, entry=8),
            _Section(".data", 1, write, bytes(8 * self.count), PAGE),
        ]
        if not versions:
            sections = [section for section in sections if not section.name.startswith(".gnu.version")]
        self.sections = {section.name: section for section in sections}
        self.number = {section.name: index for index, section in enumerate(sections, 1)}

    def place(self) -> None:
        at = EHDR + PHDR * SEGMENTS
        for section in self.sections.values():
            section.at = -(-at // section.align) * section.align
            at = section.at + len(section.data)

    def at(self, name: str) -> int:
        return self.sections[name].at

    def stub(self, entry: int) -> int:
        return self.at(".text") + FIRST_STUB + STUB * entry

    def slot(self, entry: int) -> int:
        return self.at(".data") + 8 * entry

    def fill_code(self) -> None:
        text, message = self.at(".text"), self.at(".rodata") + len(self.path)
        code = [
            # endbr64; lea proxy(%rip),%rdi; jmp *bind(%rip). A tail call: the stack stays as the loader aligned it.
            ENDBR + b"\x48\x8d\x3d" + _i32(self.at(".data.rel.ro") - (text + 11))
            + b"\xff\x25" + _i32(self.at(".got") - (text + 17)),
            # endbr64; mov $code,%eax; ret
            ENDBR + b"\xb8" + _i32(UNBOUND[self.kind]) + b"\xc3",
            # endbr64; lea message(%rip),%rax; ret
            ENDBR + b"\x48\x8d\x05" + _i32(message - (text + TEXT_ANSWER + 11)) + b"\xc3",
        ]
        out = b"".join(part.ljust(size, b"\xcc") for part, size in zip(code, (ANSWER, STUB, STUB), strict=True))
        for entry in range(self.count):  # endbr64; jmp *slot(%rip); six bytes of nop
            out += ENDBR + b"\xff\x25" + _i32(self.slot(entry) - (self.stub(entry) + 10)) + b"\x66\x0f\x1f\x44\x00\x00"
        self.sections[".text"].data = out

    def fill_symbols(self) -> None:
        # name, binding and STT_FUNC, visibility, section, value, size
        symbols = [(0, 0, 0, 0, 0, 0), (self.names_at[0], 0x12, 0, 0, 0, 0)]
        for name, entry in zip(self.names_at[1:], self.order, strict=True):
            kind = 0x22 if self.entries[entry].weak else 0x12
            symbols.append((name, kind, 0, self.number[".text"], self.stub(entry), 10))
        self.sections[".dynsym"].data = b"".join(struct.pack("<IBBHQQ", *symbol) for symbol in symbols)

    def fill_data(self) -> None:
        """struct cgpu_proxy, the names, the slots: all pointers, so all of it comes from relocations."""
        proxy, text, strings = self.at(".data.rel.ro"), self.at(".text"), self.at(".dynstr")
        names = proxy + PROXY_SIZE
        relative = [(self.at(".init_array"), text), (proxy + 8, self.at(".rodata")), (proxy + 24, names),
                    (proxy + 32, self.at(".data"))]
        for index, entry in enumerate(self.entries):
            answer = TEXT_ANSWER if entry.name in TEXT_FUNCTIONS else ANSWER
            relative += [(names + 8 * index, strings + self.labels_at[index]), (self.slot(index), text + answer)]
        relocations = [struct.pack("<QQq", place, R_RELATIVE, value) for place, value in sorted(relative)]
        relocations.append(struct.pack("<QQq", self.at(".got"), 1 << 32 | R_GLOB_DAT, 0))
        self.sections[".rela.dyn"].data = b"".join(relocations)
        self.relative = len(relative)
        self.sections[".data.rel.ro"].data = struct.pack("<IIQQQQ", ABI, self.kind, 0, self.count, 0, 0).ljust(
            PROXY_SIZE + 8 * self.count, b"\0")

    def fill_unwinding(self) -> None:
        """One rule for all of .text, true at every instruction: the return address is on top of the stack."""
        frame, header, text = self.at(".eh_frame"), self.at(".eh_frame_hdr"), self.sections[".text"]
        # length, id, version, augmentation, code and data alignment, return address register, augmentation data: FDE
        # pointers are pcrel|sdata4; DW_CFA_def_cfa rsp+8; DW_CFA_offset rip at cfa-8
        cie = struct.pack("<II", 20, 0) + b"\x01zR\0\x01\x78\x10\x01\x1b" + b"\x0c\x07\x08\x90\x01" + bytes(2)
        fde = struct.pack("<IIiI", 20, 28, text.at - (frame + 32), len(text.data)) + bytes(8)
        self.sections[".eh_frame"].data = cie + fde + bytes(4)
        self.sections[".eh_frame_hdr"].data = b"\x01\x1b\x03\x3b" + struct.pack(
            "<iIii", frame - (header + 4), 1, text.at - header, frame + 24 - header)

    def fill_dynamic(self) -> None:
        sections = self.sections
        entries = [
            (1, self.needed), (14, self.soname), (29, self.runpath),
            (25, self.at(".init_array")), (27, 8),
            (4, self.at(".hash")), (0x6FFFFEF5, self.at(".gnu.hash")),
            (5, self.at(".dynstr")), (10, len(sections[".dynstr"].data)), (6, self.at(".dynsym")), (11, 24),
            (7, self.at(".rela.dyn")), (8, len(sections[".rela.dyn"].data)), (9, 24), (0x6FFFFFF9, self.relative),
            (24, 0), (30, 0x8), (0x6FFFFFFB, 0x1 | 0x8),  # BIND_NOW, FLAGS, FLAGS_1: NOW NODELETE
        ]
        if self.versions:
            entries += [(0x6FFFFFF0, self.at(".gnu.version")), (0x6FFFFFFC, self.at(".gnu.version_d")),
                        (0x6FFFFFFD, len(self.versions))]
        data = b"".join(struct.pack("<QQ", tag, value) for tag, value in entries)
        assert len(data) < len(sections[".dynamic"].data), "the last entry must stay DT_NULL"
        sections[".dynamic"].data = data.ljust(len(sections[".dynamic"].data), b"\0")

    def finish(self) -> bytes:
        out = bytearray()
        for section in self.sections.values():
            assert section.at >= len(out), f"{section.name} grew after it was placed"
            out += bytes(section.at - len(out)) + section.data
        tables = self._section_headers(len(out))
        out[0:EHDR] = self._header(-(-(len(out) + len(tables[0])) // 8) * 8)
        headers = self._program_headers()
        out[EHDR:EHDR + len(headers)] = headers
        digest = hashlib.sha1(bytes(out)).digest()  # an identity, no protection
        note = self.at(".note.gnu.build-id")
        out[note:note + 36] = struct.pack("<III4s", 4, 20, 3, b"GNU\0") + digest
        out += tables[0]
        out += bytes(-len(out) % 8) + tables[1]
        return bytes(out)

    def _header(self, shoff: int) -> bytes:
        identity = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
        return identity + struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, EHDR, shoff, 0, EHDR, PHDR, SEGMENTS, 64,
                                      len(self.sections) + 2, len(self.sections) + 1)

    def _program_headers(self) -> bytes:
        sections = self.sections
        read, write, execute = 4, 2, 1

        def span(kind: int, flags: int, first: str, last: str, align: int) -> tuple[int, int, int, int, int]:
            start = 0 if first == "" else self.at(first)
            return kind, flags, start, self.at(last) + len(sections[last].data) - start, align

        relro = self.at(".data") - self.at(".init_array")  # whole pages, or the loader would leave out the last one
        spans = [
            span(1, read, "", ".eh_frame", PAGE),
            span(1, read | execute, ".text", ".text", PAGE),
            span(1, read | write, ".init_array", ".data", PAGE),
            span(2, read | write, ".dynamic", ".dynamic", 8),
            span(4, read, ".note.gnu.build-id", ".note.gnu.build-id", 4),
            span(0x6474E550, read, ".eh_frame_hdr", ".eh_frame_hdr", 4),
            (0x6474E551, read | write, 0, 0, 16),  # PT_GNU_STACK: not executable
            (0x6474E552, read, self.at(".init_array"), relro, 1),
        ]
        assert len(spans) == SEGMENTS
        return b"".join(struct.pack("<IIQQQQQQ", kind, flags, start, start, start, size, size, align)
                        for kind, flags, start, size, align in spans)

    def _section_headers(self, end: int) -> tuple[bytes, bytes]:
        """The section names, and the table: what binutils and gdb read. ``end``: where the names will lie."""
        names = _Strings()
        table = bytes(64)
        for section in self.sections.values():
            link = self.number.get(section.link, 0)
            table += struct.pack("<IIQQQQIIQQ", names.add(section.name), section.kind, section.flags, section.at,
                                 section.at, len(section.data), link, section.info, section.align, section.entry)
        own = names.add(".shstrtab")
        table += struct.pack("<IIQQQQIIQQ", own, 3, 0, 0, end, len(names.data), 0, 0, 1, 0)
        return bytes(names.data), table


def _i32(value: int) -> bytes:
    return struct.pack("<i", value)
