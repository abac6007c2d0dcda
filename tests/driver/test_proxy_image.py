"""The proxy as a file: what it exports, against libraries of many makes, and whether other tools accept it."""

import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from driver_tools import INCLUDES, Compile, run

from cgpusched.driver import elf, image, proxy
from cgpusched.errors import UserError

ODD = ["cu", "c", "_", "cuInit2", "cuInitX", "cuInit", "a.b", "with$dollar", "cublasCreate", "x" * 300, "cu_Ω", "Z",
       "z", "cuMemAlloc", "cuMemAlloc_v2", "cuMemAlloc_v2_", "_init2", "nvmlInit", "main2", "cuGetProcAddress_v2"]
PLAIN = "int cuInit(int a) { return a + 1; } int cuOther(int a) { return a + 2; }"
VERSIONED = """
int one_old(int a) { return a + 10; } int one_new(int a) { return a + 20; } int two(int a) { return a + 30; }
int only_old(int a) { return a + 40; }
__asm__(".symver one_old,one@V_1"); __asm__(".symver one_new,one@@V_2"); __asm__(".symver only_old,only@V_1");
"""
SCRIPT = "V_1 { global: one; only; local: *_old; *_new; }; V_2 { global: one; two; } V_1;"


def exported(library: Path) -> list[str]:
    """Functions with their versions, as nm sees them (@@ default, @ hidden)."""
    out = run("nm", "-D", "--defined-only", library)
    return sorted(line.split()[2] for line in out.splitlines() if line.split()[1] in "TWi")


def write(real: Path, out: Path, soname: str = "libcuda.so.1") -> Path:
    out.write_bytes(proxy.write_proxy(real, soname))
    return out


def odd_source() -> str:
    return "\n".join(f'int odd{i}(int) __asm__("{name}"); int odd{i}(int a) {{ return a + {i}; }}'
                     for i, name in enumerate(ODD))


@pytest.mark.parametrize("flags", [
    [], ["-Wl,--hash-style=sysv"], ["-Wl,--hash-style=gnu"], ["-Wl,-s"], ["-Wl,-Bsymbolic"], ["-Wl,-z,now,-z,relro"],
    ["-Wl,-soname,libcuda.so.1"], ["-Wl,-z,noseparate-code"]], ids=lambda flags: "".join(flags) or "plain")
def test_exports_are_those_of_the_real_library(flags: list[str], compile_library: Compile, tmp_path: Path) -> None:
    real = compile_library("libcuda.so.1.0", odd_source(), *flags)
    made = write(real, tmp_path / "libcuda.so.1")
    assert exported(made) == sorted(ODD) == exported(real)
    assert elf.read(made).functions == elf.read(real).functions


def test_versions_are_kept(compile_library: Compile, compile_program: Compile, hook: Path, tmp_path: Path) -> None:
    script = tmp_path / "versions"
    script.write_text(SCRIPT)
    real = compile_library("libcuda.so.9", VERSIONED, f"-Wl,--version-script={script},-soname,libcuda.so.1")
    made = write(real, tmp_path / "libcuda.so.1")
    assert exported(made) == exported(real) == ["one@@V_2", "one@V_1", "only@V_1", "two@@V_2"]
    assert [v.name for v in elf.read(made).versions] == ["libcuda.so.1", "V_1", "V_2"]
    assert elf.read(made).versions[2].parents == ("V_1",)
    shutil.copy(hook, tmp_path / "libcgpu-hook.so.1")
    # linked: the default version; dlvsym: each; dlsym of a hidden one as glibc does it for the real library
    program = compile_program("versions.exe", """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stdio.h>
        int one(int), two(int);
        int main(void) {
            void *h = dlopen("libcuda.so.1", RTLD_NOW);
            int (*v1)(int) = dlvsym(h, "one", "V_1"), (*v2)(int) = dlvsym(h, "one", "V_2");
            int (*o)(int) = dlvsym(h, "only", "V_1");
            printf("%d %d %d %d %d %d\\n", one(0), two(0), v1(0), v2(0), o(0), dlvsym(h, "two", "V_1") == NULL);
        }""", made, f"-Wl,-rpath,{tmp_path}")
    assert run(program) == "20 30 10 20 40 1\n"


def test_weak_ifunc_and_protected_functions_are_offered_data_is_not(
        compile_library: Compile, compile_program: Compile, hook: Path, tmp_path: Path) -> None:
    real = compile_library("libcuda.so.9", """
        int variable = 7; int zeroed[100]; __thread int tls;
        static int chosen(int a) { return a + 5; }
        static void *choose(void) { return chosen; }
        int picked(int) __attribute__((ifunc("choose")));
        __attribute__((weak)) int feeble(int a) { return a + 6; }
        __attribute__((visibility("protected"))) int guarded(int a) { return a + 7; }
        __attribute__((visibility("hidden"))) int secret(int a) { return a; }
        __asm__(".text\\n.globl bare\\nbare: movl $8,%eax\\nret\\n");
        __asm__(".globl constant\\n.set constant, 42\\n");
        """)
    library = elf.read(real)
    assert library.data == ("tls", "variable", "zeroed")
    made = write(real, tmp_path / "libcuda.so.1")
    assert [f.name for f in elf.read(made).functions] == ["bare", "feeble", "guarded", "picked"]
    assert next(f for f in elf.read(made).functions if f.name == "feeble").weak
    shutil.copy(hook, tmp_path / "libcgpu-hook.so.1")
    program = compile_program("kinds.exe", """
        #include <stdio.h>
        int bare(void), feeble(int), guarded(int), picked(int);
        int main(void) { printf("%d %d %d %d\\n", bare(), feeble(0), guarded(0), picked(0)); }
        """, made, f"-Wl,-rpath,{tmp_path}")
    assert run(program) == "8 6 7 5\n"


def test_thousands_of_exports(compile_library: Compile, compile_program: Compile, hook: Path, tmp_path: Path) -> None:
    count = 4000
    real = compile_library("libcuda.so.9", "\n".join(f"int cuMany{i}(void) {{ return {i}; }}" for i in range(count)))
    made = write(real, tmp_path / "libcuda.so.1")
    shutil.copy(hook, tmp_path / "libcgpu-hook.so.1")
    program = compile_program("many.exe", f"""
        #include <dlfcn.h>
        #include <stdio.h>
        int main(void) {{
            void *h = dlopen("{made}", RTLD_NOW);
            char name[32]; int good = 0;
            for (int i = 0; i < {count}; i++) {{
                snprintf(name, sizeof name, "cuMany%d", i);
                int (*f)(void) = dlsym(h, name);
                good += f && f() == i && f() == i;
            }}
            printf("%d\\n", good);
        }}""")
    log = tmp_path / "log"
    assert run(program, env={"CGPU_LOG": str(log)}) == f"{count}\n"
    # 1024 of them have a way in that notes the first call; the log says the first of those and holds back the rest
    assert 100 < log.read_text().count("unknown driver function") <= 1024


def test_binutils_and_gdb_accept_it(compile_library: Compile, hook: Path, tmp_path: Path) -> None:
    made = write(compile_library("libcuda.so.9", PLAIN), tmp_path / "libcuda.so.1")
    shutil.copy(hook, tmp_path / "libcgpu-hook.so.1")
    command = ["readelf", "--all", "--debug-dump=frames", "--lint", "-W", str(made)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert "BIND_NOW" in done.stdout and "NODELETE" in done.stdout and "$ORIGIN" in done.stdout
    assert re.search(r"GNU_STACK .* RW +0x10", done.stdout)
    segments = re.findall(r"^  LOAD .* (R[ W][ E]) ", done.stdout, re.M)
    assert segments == ["R  ", "R E", "RW "], "never writable and executable at once"
    assert "<cuInit>:" in run("objdump", "-d", made)
    assert "libcgpu-hook.so.1 => " + str(tmp_path) in run("ldd", made)
    if shutil.which("gdb"):
        assert "cuOther" in run("gdb", "-nx", "-batch", "-ex", "info functions cuOther", made)


def test_the_same_library_gives_the_same_bytes(compile_library: Compile) -> None:
    real = compile_library("libcuda.so.9", odd_source())
    assert proxy.write_proxy(real, "libcuda.so.1") == proxy.write_proxy(real, "libcuda.so.1")


def test_before_it_is_bound_a_function_answers_not_initialised(
        compile_library: Compile, compile_program: Compile, tmp_path: Path) -> None:
    """A hook that calls the slots as it finds them stands for a call that comes before the constructor."""
    real = compile_library("libcuda.so.9", "int cuInit(int a) { return 0; } int nvmlInit(void) { return 0; } "
                           "const char *nvmlErrorString(int e) { return 0; }")
    compile_library("../libcgpu-hook.so.1", """
        #include <stdio.h>
        #include "hook.h"
        void cgpu_proxy_bind(const struct cgpu_proxy *p) {
            for (unsigned i = 0; i < p->count; i++)
                if (i == 1) printf("%s ", ((const char *(*)(int))p->slots[i])(1));
                else printf("%s=%d ", p->names[i], ((int (*)(int))p->slots[i])(1));
            printf("abi=%u lib=%u %s\\n", p->abi, p->lib, p->real_path); fflush(stdout);
        }""", *INCLUDES)
    for soname, code, lib in (("libcuda.so.1", 3, 0), ("libnvidia-ml.so.1", 1, 1)):
        made = write(real, tmp_path / soname, soname)
        main = f'#include <dlfcn.h>\nint main() {{ return !dlopen("{made}", RTLD_NOW); }}'
        program = compile_program("early.exe", main)
        assert run(program) == f"cuInit={code} driver not loaded yet nvmlInit={code} abi=1 lib={lib} {real}\n"


@pytest.mark.parametrize(("offset", "value", "message"), [
    (4, b"\x01", "64-bit"), (5, b"\x02", "64-bit"), (18, struct.pack("<H", 183), "machine 183"),
    (16, b"\x02\x00", "not a shared"), (0, b"MZ", "not an ELF")])
def test_another_machines_library_is_refused(offset: int, value: bytes, message: str, compile_library: Compile) -> None:
    real = compile_library("libcuda.so.9", PLAIN)
    data = bytearray(real.read_bytes())
    data[offset:offset + len(value)] = value
    real.write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        proxy.write_proxy(real, "libcuda.so.1")
    assert str(real) in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_ours_is_refused(compile_library: Compile, hook: Path, tmp_path: Path) -> None:
    made = write(compile_library("libcuda.so.9", PLAIN), tmp_path / "libcuda.so.1")
    with pytest.raises(UserError, match="is a proxy of ours"):
        proxy.write_proxy(made, "libcuda.so.1")
    with pytest.raises(UserError, match="is our hook library"):
        proxy.write_proxy(hook, "libcuda.so.1")
    with pytest.raises(UserError, match="exports no functions"):
        proxy.write_proxy(compile_library("libempty.so", "int variable = 1;"), "libcuda.so.1")


def test_bind_struct_matches_the_header(compile_program: Compile) -> None:
    program = compile_program("layout.exe", """
        #include <stdio.h>
        #include "hook.h"
        #define AT(member) offsetof(struct cgpu_proxy, member)
        int main(void) { printf("%zu %zu %zu %zu %u %d %d\\n", sizeof(struct cgpu_proxy), AT(real_path), AT(names),
                                AT(slots), CGPU_ABI_VERSION, HOOK_CUDA, HOOK_NVML); }
        """, *INCLUDES)
    assert run(program) == f"{image.PROXY_SIZE} 8 24 32 {image.ABI} {image.Kind.CUDA:d} {image.Kind.NVML:d}\n"
