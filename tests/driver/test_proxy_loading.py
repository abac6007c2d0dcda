"""Every way a program can reach the driver ends in the proxy, and from there in the real library."""

import shutil
from pathlib import Path

import pytest
from driver_tools import Compile, run

from cgpusched.driver import proxy
from cgpusched.driver.find import Driver

REAL_CUDA = """
#include <stddef.h>
typedef unsigned long long u64;
int cuInit(unsigned f) { return 0; }
int cuMemAlloc_v2(u64 *p, size_t n) { *p = n + 1; return 0; }
int cuMemGetInfo_v2(size_t *f, size_t *t) { *f = 11; *t = 22; return 0; }
int cuFutureThing(int a, double b, int c) { return a + (int)b + c; }
"""
# its own export through its own PLT, as the real libnvidia-ml does, and by a pointer in read-only data
REAL_NVML = """
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 5; return 0; }
int nvmlInit_v2(void) { unsigned n = 0; nvmlDeviceGetCount_v2(&n); return n; }
static int (*const table[])(unsigned *) = {nvmlDeviceGetCount_v2};
int nvmlShutdown(void) { unsigned n = 0; table[0](&n); return n; }
const char *nvmlErrorString(int e) { return "real text"; }
"""
PROLOGUE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
typedef unsigned long long u64;
/* the hook loaded with the library that holds `function` */
static unsigned long wrapped(void) {
    void *h = dlopen("libcgpu-hook.so.1", RTLD_NOW | RTLD_NOLOAD);
    return h ? *(unsigned long *)dlsym(h, "test_wrapped_calls") : 999;
}
"""


@pytest.fixture
def driver(compile_library: Compile) -> Driver:
    cuda = compile_library("libcuda.so.999.1", REAL_CUDA, "-Wl,-soname,libcuda.so.1,-Bsymbolic")
    nvml = compile_library("libnvidia-ml.so.999.1", REAL_NVML, "-Wl,-soname,libnvidia-ml.so.1")
    return Driver(cuda, nvml)


@pytest.fixture
def lib(driver: Driver, hook: Path, tmp_path: Path) -> Path:
    """The folder of the proxies."""
    proxy.install_proxies(driver, tmp_path / "lib", hook)
    return tmp_path / "lib"


CALL = """
    u64 p = 0; size_t f = 0, t = 0;
    int r = alloc(&p, 41); info(&f, &t);
    printf("%d %d %d %d %lu\\n", r, (int)p, (int)f, (int)t, wrapped());
"""
EXPECTED = "0 42 11 22 1\n"  # forwarded with its arguments, and through our wrapper once


def test_linked(lib: Path, compile_program: Compile) -> None:
    program = compile_program("linked", PROLOGUE + """
        int cuMemAlloc_v2(u64 *, size_t), cuMemGetInfo_v2(size_t *, size_t *);
        #define alloc cuMemAlloc_v2
        #define info cuMemGetInfo_v2
        int main(void) {""" + CALL + "}", lib / "libcuda.so.1")
    assert run(program, env={"LD_LIBRARY_PATH": str(lib)}) == EXPECTED


def test_linked_without_anyone_knowing_its_path(lib: Path, compile_program: Compile) -> None:
    (lib / "libcuda.so").symlink_to("libcuda.so.1")
    program = compile_program("linked", PROLOGUE + """
        int cuMemAlloc_v2(u64 *, size_t), cuMemGetInfo_v2(size_t *, size_t *);
        #define alloc cuMemAlloc_v2
        #define info cuMemGetInfo_v2
        int main(void) {""" + CALL + "}", f"-L{lib}", "-lcuda")
    assert run(program, env={"LD_LIBRARY_PATH": str(lib)}) == EXPECTED


OPENINGS = {
    "by-name": 'dlopen("libcuda.so.1", RTLD_NOW)',
    "lazily": 'dlopen("libcuda.so.1", RTLD_LAZY)',
    "globally": 'dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL)',
    "by-path": 'dlopen(getenv("LIBCUDA"), RTLD_NOW)',
    "deepbind": 'dlopen("libcuda.so.1", RTLD_NOW | RTLD_DEEPBIND)',
    "reopened": '(dlclose(dlopen("libcuda.so.1", RTLD_NOW)), dlopen("libcuda.so.1", RTLD_NOW))',
}


@pytest.mark.parametrize("how", OPENINGS)
def test_opened(how: str, lib: Path, compile_program: Compile) -> None:
    program = compile_program("opened", PROLOGUE + f"""
        int main(void) {{
            void *h = {OPENINGS[how]};
            if (!h) return puts(dlerror());
            int (*alloc)(u64 *, size_t) = dlsym(h, "cuMemAlloc_v2");
            int (*info)(size_t *, size_t *) = dlsym(h, "cuMemGetInfo_v2");
            if (dlsym(h, "cuNotThere")) return puts("found too much");
            /* glibc: any version of a library that has none */
            if (dlvsym(h, "cuInit", "V_1") != dlsym(h, "cuInit")) return puts("dlvsym");
            {CALL}
        }}""")
    assert run(program, env={"LD_LIBRARY_PATH": str(lib), "LIBCUDA": str(lib / "libcuda.so.1")}) == EXPECTED


def test_dlmopen(lib: Path, compile_program: Compile) -> None:
    """Another namespace has its own proxy, hook and real library."""
    program = compile_program("dlmopen", PROLOGUE + """
        int main(void) {
            for (int i = 0; i < 2; i++) {
                void *h = dlmopen(LM_ID_NEWLM, "libcuda.so.1", RTLD_NOW);
                if (!h) return puts(dlerror());
                int (*alloc)(u64 *, size_t) = dlsym(h, "cuMemAlloc_v2");
                u64 p = 0;
                int r = alloc(&p, 41);
                printf("%d %d %lu\\n", r, (int)p, *(unsigned long *)dlsym(h, "test_wrapped_calls"));
            }
        }""")
    assert run(program, env={"LD_LIBRARY_PATH": str(lib)}) == "0 42 1\n0 42 1\n"


def test_rtld_next_of_a_library_before_it(lib: Path, compile_library: Compile, compile_program: Compile) -> None:
    """A tool that is preloaded and goes on by RTLD_NEXT comes to the proxy."""
    tool = compile_library("tool.so", PROLOGUE + """
        int cuMemAlloc_v2(u64 *p, size_t n) {
            int (*next)(u64 *, size_t) = dlsym(RTLD_NEXT, "cuMemAlloc_v2");
            return next(p, n + 100);
        }""")
    program = compile_program("linked", PROLOGUE + """
        int cuMemAlloc_v2(u64 *, size_t), cuMemGetInfo_v2(size_t *, size_t *);
        int main(void) { u64 p = 0; cuMemAlloc_v2(&p, 41); printf("%d %lu\\n", (int)p, wrapped()); }
        """, lib / "libcuda.so.1")
    assert run(program, env={"LD_LIBRARY_PATH": str(lib), "LD_PRELOAD": str(tool)}) == "142 1\n"


def test_plugin_with_deepbind(lib: Path, compile_library: Compile, compile_program: Compile) -> None:
    plugin = compile_library("plugin.so", PROLOGUE + """
        int cuMemAlloc_v2(u64 *, size_t), cuMemGetInfo_v2(size_t *, size_t *);
        #define alloc cuMemAlloc_v2
        #define info cuMemGetInfo_v2
        void go(void) {""" + CALL + "}", lib / "libcuda.so.1")
    program = compile_program("host", PROLOGUE + f"""
        int main(void) {{
            void *h = dlopen("{plugin}", RTLD_NOW | RTLD_DEEPBIND);
            if (!h) return puts(dlerror());
            ((void (*)(void))dlsym(h, "go"))();
        }}""")
    assert run(program, env={"LD_LIBRARY_PATH": str(lib)}) == EXPECTED


@pytest.mark.parametrize("order", ["cuda nvml", "nvml cuda"])
def test_both_proxies_in_either_order(order: str, lib: Path, compile_program: Compile) -> None:
    names = {"cuda": "libcuda.so.1", "nvml": "libnvidia-ml.so.1"}
    program = compile_program("both", PROLOGUE + "int main(void) { void *h;" + "".join(
        f'if (!(h = dlopen("{names[which]}", RTLD_NOW))) return puts(dlerror());' for which in order.split()) + """
        int (*alloc)(u64 *, size_t) = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemAlloc_v2");
        void *nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        int (*count)(unsigned *) = dlsym(nvml, "nvmlDeviceGetCount_v2");
        const char *(*text)(int) = dlsym(nvml, "nvmlErrorString");
        u64 p = 0; unsigned n = 0;
        alloc(&p, 1); count(&n);
        printf("%d %u %s %lu\\n", (int)p, n, text(0), wrapped()); }""")
    assert run(program, env={"LD_LIBRARY_PATH": str(lib)}) == "2 5 real text 2\n"


@pytest.mark.parametrize("relro", ["-Wl,-z,relro,-z,now", "-Wl,-z,relro,-z,lazy", "-Wl,-z,norelro"])
def test_the_real_librarys_calls_to_itself_stay_inside(
        relro: str, compile_library: Compile, compile_program: Compile, hook: Path, driver: Driver,
        tmp_path: Path) -> None:
    """Else NVML would see our wrappers from inside: our numbering of devices, our quota. See selfbind.c."""
    nvml = compile_library("libnvidia-ml.so.999.2", REAL_NVML, "-Wl,-soname,libnvidia-ml.so.1", relro)
    proxy.install_proxies(Driver(driver.cuda, nvml), tmp_path / "lib", hook)
    program = compile_program("self", PROLOGUE + """
        int nvmlInit_v2(void), nvmlShutdown(void);
        int main(void) { int a = nvmlInit_v2(), b = nvmlShutdown(); printf("%d %d %lu\\n", a, b, wrapped()); }
        """, tmp_path / "lib/libnvidia-ml.so.1")
    assert run(program, env={"LD_LIBRARY_PATH": str(tmp_path / "lib")}) == "5 5 0\n"


MISSING = PROLOGUE + """
    int main(void) {
        void *c = dlopen("libcuda.so.1", RTLD_NOW), *n = dlopen("libnvidia-ml.so.1", RTLD_NOW);
        if (!c || !n) return puts(dlerror());
        int (*init)(unsigned) = dlsym(c, "cuInit"), (*ninit)(void) = dlsym(n, "nvmlInit_v2");
        int (*future)(void) = dlsym(c, "cuFutureThing"), (*alloc)(u64 *, size_t) = dlsym(c, "cuMemAlloc_v2");
        u64 p;
        printf("%d %d %d %d\\n", init(0), ninit(), future(), alloc(&p, 1));
    }"""


def test_without_the_real_library(lib: Path, driver: Driver, compile_program: Compile, tmp_path: Path) -> None:
    driver.cuda.unlink()
    driver.nvml.unlink()
    program = compile_program("missing", MISSING)
    log = tmp_path / "log"
    # CUDA_ERROR_NO_DEVICE, NVML_ERROR_LIBRARY_NOT_FOUND
    assert run(program, env={"LD_LIBRARY_PATH": str(lib), "CGPU_LOG": str(log)}) == "100 12 100 100\n"
    lines = log.read_text().splitlines()
    assert len(lines) == 2 and all("level=error" in line and "cannot be opened" in line for line in lines)


def test_driver_dir_overrides_the_folder(lib: Path, compile_library: Compile, compile_program: Compile) -> None:
    """Names that the driver of that folder lacks answer CUDA_ERROR_NOT_FOUND."""
    other = compile_library("libcuda.so.1", "int cuInit(unsigned f) { return 77; }").parent
    compile_library("libnvidia-ml.so.1", "int nvmlInit_v2(void) { return 88; }")
    program = compile_program("missing", MISSING)
    assert run(program, env={"LD_LIBRARY_PATH": str(lib), "CGPU_DRIVER_DIR": str(other)}) == "77 88 500 500\n"


def test_a_driver_dir_of_proxies_is_not_followed(lib: Path, compile_program: Compile, tmp_path: Path) -> None:
    """Neither the proxy itself nor a copy of it is taken for the real library; nothing recurses."""
    program = compile_program("missing", MISSING)
    copy = tmp_path / "copy"
    shutil.copytree(lib, copy)
    for folder in (lib, copy):
        log = tmp_path / f"log.{folder.name}"
        env = {"LD_LIBRARY_PATH": str(lib), "CGPU_DRIVER_DIR": str(folder), "CGPU_LOG": str(log)}
        assert run(program, env=env) == "100 12 100 100\n"
        assert "is a proxy, not the real one" in log.read_text()


def test_the_real_files_beside_the_hook(lib: Path, driver: Driver, compile_program: Compile, tmp_path: Path) -> None:
    """As where the proxies are mounted over the driver's own files: the path they were made from leads to a proxy."""
    program = compile_program("opened", PROLOGUE + f"""
        int main(void) {{
            void *h = dlopen("libcuda.so.1", RTLD_NOW);
            int (*alloc)(u64 *, size_t) = dlsym(h, "cuMemAlloc_v2");
            int (*info)(size_t *, size_t *) = dlsym(h, "cuMemGetInfo_v2");
            if (dlopen("{driver.cuda}", RTLD_NOW) != h) return puts("another one");
            {CALL}
        }}""")
    env = {"LD_LIBRARY_PATH": str(lib), "CGPU_LOG": str(tmp_path / "log"), "CGPU_LOG_LEVEL": "info"}
    for real in (driver.cuda, driver.nvml):
        link = lib / "real" / f"{real.name.split('.so')[0]}.so.1"
        link.unlink()
        real.rename(link)
        real.hardlink_to(lib / link.name)
    assert run(program, env=env) == EXPECTED
    assert run(program, env=env | {"CGPU_DRIVER_DIR": str(lib)}) == EXPECTED, "the environment does not matter"
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize("left", [b"", b"not a library"])
def test_nothing_usable_beside_the_hook(left: bytes, lib: Path, compile_program: Compile) -> None:
    """A mount point that nothing was mounted on: the path that the proxy has is the next to be tried."""
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (lib / "real" / name).unlink()
        (lib / "real" / name).write_bytes(left)
    program = compile_program("opened", PROLOGUE + f"""
        int main(void) {{
            void *h = dlopen("libcuda.so.1", RTLD_NOW);
            int (*alloc)(u64 *, size_t) = dlsym(h, "cuMemAlloc_v2");
            int (*info)(size_t *, size_t *) = dlsym(h, "cuMemGetInfo_v2");
            {CALL}
        }}""")
    assert run(program, env={"LD_LIBRARY_PATH": str(lib)}) == EXPECTED


def test_found_by_its_full_name_where_the_folder_differs(
        lib: Path, driver: Driver, compile_program: Compile, tmp_path: Path) -> None:
    """As in a container that has the same driver elsewhere on the loader's path."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for real in (driver.cuda, driver.nvml):
        real.rename(elsewhere / real.name)
    program = compile_program("moved", PROLOGUE + """
        int main(void) {
            void *h = dlopen("libcuda.so.1", RTLD_NOW);
            int (*alloc)(u64 *, size_t) = dlsym(h, "cuMemAlloc_v2");
            int (*info)(size_t *, size_t *) = dlsym(h, "cuMemGetInfo_v2");
            """ + CALL + "}")
    assert run(program, env={"LD_LIBRARY_PATH": f"{lib}:{elsewhere}"}) == EXPECTED


def test_two_copies_of_the_proxy_in_one_process(lib: Path, compile_program: Compile, tmp_path: Path) -> None:
    shutil.copytree(lib, tmp_path / "copy")
    program = compile_program("copies", PROLOGUE + f"""
        int main(void) {{
            dlopen("{lib}/libcuda.so.1", RTLD_NOW);
            void *h = dlopen("{tmp_path}/copy/libcuda.so.1", RTLD_NOW);
            int (*alloc)(u64 *, size_t) = dlsym(h, "cuMemAlloc_v2");
            int (*info)(size_t *, size_t *) = dlsym(h, "cuMemGetInfo_v2");
            {CALL}
        }}""")
    assert run(program, env={"LD_LIBRARY_PATH": str(lib)}) == EXPECTED


def test_no_failure_of_ours_is_left_in_dlerror(lib: Path, compile_program: Compile) -> None:
    """The test hook asks for cuNoDriverHasThis while it binds; programs call dlerror() after a dlopen() that worked."""
    program = compile_program("dlerror", PROLOGUE + """
        int main(void) {
            dlerror();
            void *h = dlopen("libcuda.so.1", RTLD_NOW);
            const char *error = dlerror();
            printf("%d %s\\n", h != NULL, error ? error : "none");
        }""")
    assert run(program, env={"LD_LIBRARY_PATH": str(lib)}) == "1 none\n"


def test_errno_and_stdout_are_the_programs_own(lib: Path, compile_program: Compile, tmp_path: Path) -> None:
    program = compile_program("errno", PROLOGUE + """
        #include <errno.h>
        int main(void) {
            void *h = dlopen("libcuda.so.1", RTLD_NOW);
            int (*future)(int, double, int) = dlsym(h, "cuFutureThing");
            errno = 1234;
            int r = future(1, 2.5, 3);
            printf("%d %d\\n", r, errno);
        }""")
    assert run(program, env={"LD_LIBRARY_PATH": str(lib)}) == "6 1234\n"
    # nowhere to write to: still nothing but the answer
    assert run(program, env={"LD_LIBRARY_PATH": str(lib), "CGPU_LOG": "/proc/none/log"}) == "6 1234\n"
