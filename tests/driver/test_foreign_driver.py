"""A driver we have never seen: driver 550's exports and 20 names nobody knows, each checking what it is called with."""

import re
import subprocess
from pathlib import Path

import pytest
from driver_tools import FLAGS, HOOK_FLAGS, ROOT, SRC, gcc, run

from cgpusched.driver import elf, proxy
from cgpusched.driver.find import Driver, packaged
from cgpusched.errors import UserError

DATA = Path(__file__).parent / "data/driver-550.txt"
FOREIGN = [f"cuForeign{i:02}" for i in range(20)]
OWN = {"cuGetProcAddress", "cuGetProcAddress_v2", "cuGetExportTable"}  # foreign.c writes these itself
NUMBERS = {"char": 0xFF, "short": 0xFFFF}
# Types in CU that are numbers, not pointers.
VALUES = {"CUdevice", "CUdeviceptr", "CUdeviceptr_v1", "CUmemGenericAllocationHandle", "CUstreamCaptureMode",
          "CUfunction_attribute", "CUmemPool_attribute", "CUgraphMem_attribute", "CUlimit"}
# Arguments that our wrappers replace, knowingly: callbacks go through one of ours; what a pitched allocation or an
# array came to is looked at before the program gets it.
REPLACED = {name: {0} for name in ("cuArrayCreate", "cuArrayCreate_v2", "cuArray3DCreate", "cuArray3DCreate_v2",
                                   "cuMipmappedArrayCreate")} | {
    "cuLaunchHostFunc": {1, 2}, "cuLaunchHostFunc_ptsz": {1, 2}, "cuStreamAddCallback": {1, 2},
    "cuStreamAddCallback_ptsz": {1, 2}, "cuMemAllocPitch": {0, 1}, "cuMemAllocPitch_v2": {0, 1}}


def exports_of_550() -> list[str]:
    lines = [line.split() for line in DATA.read_text().splitlines() if not line.startswith("#")]
    return [name for library, kind, name in lines if library == "cuda" and kind == "function"]


Signatures = dict[str, list[int]]


def signatures(sources: list[Path], tables: Path) -> Signatures:
    """name -> a mask an argument, of what these C files wrap.

    -1 for pointers and handles, -2 for numbers of 64 bits, else the bits that count.
    """
    found: Signatures = {}
    for source in sources:
        include = [flag for flag in HOOK_FLAGS if flag.startswith("-I")]
        text = subprocess.run(["gcc", "-E", "-P", str(source), f"-I{tables}", *include], capture_output=True, text=True,
                              check=True).stdout
        for name, arguments in re.findall(r"static \w+ wrap_(\w+) \(([^;{]*)\);", text):
            kinds = [] if arguments.strip() == "void" else arguments.split(",")
            found[name] = [0 if x in REPLACED.get(name, ()) else mask_of(kind) for x, kind in enumerate(kinds)]
    return found


def mask_of(declared: str) -> int:
    kind = declared.strip()
    assert "float" not in kind and "double" not in kind and "(" not in kind, f"not an integer argument: {kind}"
    words = kind.split()
    if "*" in kind or words[0] == "const" or re.match(r"CU[a-zA-Z0-9]+$", words[0]) and words[0] not in VALUES:
        return -1
    if "long" in words or words[0] in ("size_t", "uint64_t", "CUdeviceptr", "CUmemGenericAllocationHandle"):
        return 0xFFFFFFFF if re.search("count|num", words[-1], re.I) else -2  # a count may be believed
    return next((mask for word, mask in NUMBERS.items() if word in words), 0xFFFFFFFF)


class Foreign:
    """The driver, a program that calls all of it, and the proxies between them."""

    def __init__(self, folder: Path, tables: Path, hook: Path, wrapped: Signatures) -> None:
        self.names = [name for name in exports_of_550() if name not in OWN] + FOREIGN
        self.wrapped = {name: masks for name, masks in wrapped.items() if name in self.names}
        lines, declared, table = [], [], []
        for i, name in enumerate(self.names):
            if name in self.wrapped:
                masks = self.wrapped[name]
                lines.append(f"W({i}, {name}, {len(masks)}, {''.join(f'{mask}L, ' for mask in masks)})")
                values = ", ".join(f"WRAPPED({i}, {x}, {mask}L)" for x, mask in enumerate(masks))
                kinds = ", ".join(["long"] * len(masks)) or "void"
            else:
                lines.append(f"F({i}, {name})")
                values, kinds = f"VALUES({i})", "ARGUMENTS"
            declared.append(f"int call{i}(int (*f)({kinds})) {{ return f({values}); }}\nint {name}({kinds});")
            table.append(f'{{"{name}", (int (*)(void *))call{i}, (void *){name}}},')
        (folder / "functions.inc").write_text("\n".join(lines))
        array = ["static const struct call calls[] = {", *table, "};"]
        (folder / "calls.inc").write_text("\n".join(declared + array))
        includes = [f"-I{folder}", f"-I{SRC}", f"-I{tables}"]
        real = folder / "libcuda.so.999.9"
        # -O0: 656 functions of 18 arguments each compile in 2 s, and it is the callers that are under test
        soname = "-Wl,-soname,libcuda.so.1,-Bsymbolic"
        gcc(SRC / "foreign.c", "-shared", "-o", real, *FLAGS, "-O0", "-w", soname, *includes)
        nvml = folder / "libnvidia-ml.so.999.9"
        (folder / "nvml.c").write_text("int nvmlInit_v2(void) { return 0; }")
        gcc(folder / "nvml.c", "-shared", "-o", nvml, *FLAGS)
        self.lib = folder / "lib"
        proxy.install_proxies(Driver(real, nvml), self.lib, hook)
        self.real = real
        self.program = folder / "caller"
        gcc(SRC / "caller.c", "-o", self.program, *FLAGS, "-O0", "-w", *includes, self.lib / "libcuda.so.1", "-ldl")
        self.log = folder / "log"

    def run(self, how: str, **env: str) -> str:
        self.log.unlink(missing_ok=True)
        paths = {"LD_LIBRARY_PATH": str(self.lib), "CGPU_LOG": str(self.log), "CGPU_SOCKET": "/nonexistent/gate.sock"}
        return run(self.program, how, env=paths | env)

    def logged(self) -> list[str]:
        text = self.log.read_text() if self.log.exists() else ""
        return re.findall(r"unknown driver function forwarded (name=\S+(?: version=\d+)?)$", text, re.M)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory, tables: Path, hook: Path) -> Foreign:
    wrapped = signatures([SRC / "wrappers.c", ROOT / "csrc/hook/procaddr.c"], tables)
    return Foreign(tmp_path_factory.mktemp("foreign"), tables, hook, wrapped)


@pytest.fixture(scope="module")
def foreign_and_real_hook(tmp_path_factory: pytest.TempPathFactory, tables: Path) -> Foreign:
    """As `foreign`, behind the hook that is shipped."""
    try:
        hook = packaged("hook/libcgpu-hook.so.1")
    except UserError as error:
        pytest.skip(str(error))
    wrapped = signatures(sorted((ROOT / "csrc/hook").glob("*.c")), tables)
    return Foreign(tmp_path_factory.mktemp("foreign"), tables, hook, wrapped)


def test_the_proxy_offers_exactly_what_the_driver_does(foreign: Foreign) -> None:
    offered = {function.name for function in elf.read(foreign.lib / "libcuda.so.1").functions}
    assert offered == set(foreign.names) | OWN
    assert len(offered) == 636 + 20


@pytest.mark.parametrize("how", ["linked", "dlsym", "getprocaddress"])
def test_every_function_gets_its_arguments(how: str, foreign: Foreign) -> None:
    """Twice each: an unknown one's first call takes another way than its second."""
    assert foreign.run(how) == expected(foreign, how)
    assert sorted(foreign.logged()) == [f"name={name}" for name in FOREIGN]  # each once, and no other


@pytest.mark.parametrize("how", ["linked", "dlsym", "getprocaddress"])
def test_every_function_gets_its_arguments_through_the_real_wrappers(how: str, foreign_and_real_hook: Foreign) -> None:
    foreign = foreign_and_real_hook
    assert len(foreign.wrapped) > 50, "the shipped hook wraps more than this"
    assert foreign.run(how) == expected(foreign, how)
    assert sorted(foreign.logged()) == [f"name={name}" for name in FOREIGN]


def expected(foreign: Foreign, how: str) -> str:
    # cuGetProcAddress cannot be asked for the exports that are in no header
    count = len(foreign.names) if how != "getprocaddress" else foreign.run("count-getprocaddress").split()[0]
    return f"{count} good twice, bad:\n"


@pytest.mark.parametrize("which", ["foreign", "foreign_and_real_hook"])
def test_table_wrappers_and_answers_agree(which: str, request: pytest.FixtureRequest) -> None:
    """What the table asks for is answered by the wrapper of the export it names, or by the driver's own function."""
    foreign: Foreign = request.getfixturevalue(which)
    symbols = run("nm", foreign.lib / "libcgpu-hook.so.1")
    wrappers = {name: int(at, 16) for at, name in re.findall(r"^(\w+) t wrap_(cu\w+)$", symbols, re.M)}
    answers = [line.split() for line in foreign.run("owners").splitlines()]
    assert len(answers) > 550
    # foreign.names: not its own cuGetProcAddress, and not what this driver answers with an older variant or hides
    expected = {name: f"{wrappers[name]:x}" if name in wrappers else "-" for name in foreign.names}
    assert not [(name, at) for name, at in answers if name in expected and at != expected[name]]
    assert {name for name, at in answers if at != "-"} >= set(foreign.wrapped) & {name for name, _ in answers}


def test_unknown_functions_are_counted_once_each_in_the_slot(foreign: Foreign) -> None:
    assert foreign.run("count", TEST_JOINED="1") == "0 20 20\n"  # before, after all were called, after all again


def test_the_count_reaches_the_slot_of_a_process_that_joins_late(foreign: Foreign) -> None:
    assert foreign.run("late") == "0 20\n"


def test_threads_calling_an_unknown_function_at_once(foreign: Foreign) -> None:
    assert foreign.run("threads", TEST_JOINED="1") == "good 1\n"


def test_getprocaddress(foreign: Foreign) -> None:
    out = foreign.run("answers")
    assert out.splitlines() == [
        "cuMemAlloc@2000 0 0 wrapper", "cuMemAlloc@3020 0 0 wrapper", "cuMemAlloc@12040 0 0 wrapper",
        "variants differ",
        "cuMemAlloc@1000 0 2 null", "cuMemAlloc_v2@12040 0 1 null", "cuNoSuchName@12040 0 1 null", "@0 0 1 null",
        "cuStreamQuery@12040 0 0 wrapper", "cuStreamQuery@12040+ptsz 0 0 wrapper", "threads differ",
        "cuInit@12040 0 0 driver", "cuInit@12040+ptsz 0 0 driver",
        "cuGetProcAddress@12000 0 0 wrapper", "through itself: cuMemAlloc@12040 0 0 wrapper",
        "old: cuMemAlloc@12040 0 wrapper", "old: cuNoSuchName@12040 500 null",
        # in no export: known to the table and wrapped, so adopted; newer than the table; unknown
        "cuGreenCtxGetId@12090 0 0 wrapper 6001", "cuMemAlloc@13020 0 0 other 6002", "cuNobodyKnowsMe@1 0 0 other 6003",
        "null arguments 1 1", "private table 0"]
    assert foreign.logged() == ["name=cuMemAlloc version=13020", "name=cuNobodyKnowsMe"]


def test_private_tables_are_named_in_the_debug_log(foreign: Foreign) -> None:
    foreign.run("answers", CGPU_LOG_LEVEL="debug")
    assert "by=cuGetExportTable uuid=5a000102-0304-0506-0708-090a0b0c0d0e" in foreign.log.read_text()


def test_the_log_levels(foreign: Foreign) -> None:
    foreign.run("dlsym", CGPU_LOG_LEVEL="error")
    assert not foreign.log.exists()


def test_a_function_stays_bound_with_the_libraries_closed(foreign: Foreign) -> None:
    assert foreign.run("closed") == "good\n"

