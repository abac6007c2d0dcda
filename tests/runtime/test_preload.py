"""libcgpu-preload.so.1: which dlopen() becomes one of a proxy, and that nothing else changes for anybody."""

import os
import subprocess
import sys
from pathlib import Path

import debs
import pytest

from cgpusched.containers import preload
from cgpusched.driver.find import packaged

OURS = "/usr/local/cgpu/lib/"
HERE = Path(__file__).parent
LIBRARY = packaged(f"hook/{preload.LIBRARY}")


def opened(name: str) -> str:
    """What the loader says that it did not find."""
    code = f"import ctypes\ntry: ctypes.CDLL({name!r})\nexcept OSError as error: print(str(error).partition(':')[0])"
    done = subprocess.run([sys.executable, "-IS", "-c", code], env={"LD_PRELOAD": str(LIBRARY)}, capture_output=True,
                          text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("name", ["/opt/app/lib/libcuda.so.1", "/x/libcuda.so", "/x/libcuda.so.550.54.15",
                                  "./libcuda.so.1", "libcuda.so", "libcuda.so.1", "stubs/x/libcuda.so.1"])
def test_the_driver_becomes_the_proxy(name: str) -> None:
    assert opened(name) == f"{OURS}libcuda.so.1"
    assert opened(name.replace("libcuda", "libnvidia-ml")) == f"{OURS}libnvidia-ml.so.1"


@pytest.mark.parametrize("name", [f"{OURS}real/libcuda.so.1", "/x/stubs/libcuda.so", "/x/libcuda.so.1x",
                                  "/x/libcudart.so.12", "/x/mylibcuda.so.1", "libcuda.so.550.54.15",
                                  "/libcuda.so.1/other", "/x/libcuda.so-1"])
def test_nothing_else_does(name: str) -> None:
    assert opened(name) == name


def test_the_caller_is_still_who_calls(tmp_path: Path) -> None:
    """By its return address the loader knows where a library that calls has its own libraries."""
    program = tmp_path / "program.c"
    (tmp_path / "lib").mkdir()
    (tmp_path / "it.c").write_text("int found = 1;")
    (tmp_path / "by.c").write_text('#include <dlfcn.h>\nint by(void) { return dlopen("libit.so", RTLD_NOW) != 0; }')
    program.write_text("int by(void);\nint main(void) { return by() ? 0 : 1; }")
    for command in ("gcc -shared -fPIC -o lib/libit.so it.c",
                    "gcc -shared -fPIC -o libby.so by.c -ldl -Wl,--enable-new-dtags,-rpath,$ORIGIN/lib",
                    "gcc -o program program.c -L. -lby -Wl,-rpath,$ORIGIN"):
        subprocess.run(command.split(), cwd=tmp_path, check=True)
    for env in ({}, {"LD_PRELOAD": str(LIBRARY)}):
        assert subprocess.run([tmp_path / "program"], env=env, check=False).returncode == 0


def test_it_needs_nothing() -> None:
    dynamic = subprocess.run(["readelf", "-dW", LIBRARY], capture_output=True, text=True, check=True).stdout
    assert "NEEDED" not in dynamic and "INIT" not in dynamic
    symbols = subprocess.run(["nm", "-D", LIBRARY], capture_output=True, text=True, check=True).stdout.splitlines()
    needs = [["w", name] for name in ("__libc_dlopen_mode", "__libc_dlsym", "dlsym")]
    assert sorted(line.split()[-2:] for line in symbols) == [["T", "dlopen"], *needs]
    done = subprocess.run(["/bin/true"], env={"LD_PRELOAD": str(LIBRARY)}, capture_output=True, check=True)
    assert done.stderr == b""


@pytest.mark.parametrize("own", [b"", b"/a.so /b.so:/c.so # x\n", b"/no-newline.so", b"\xff\0\n"])
def test_the_images_own_lines_stay_as_they_are_behind_ours(own: bytes) -> None:
    once = preload.merged(f"{OURS}{preload.LIBRARY}", own)
    assert once == os.fsencode(f"{OURS}{preload.LIBRARY}\n") + own
    assert preload.merged(f"{OURS}{preload.LIBRARY}", once) == once


def test_an_old_libc_that_loads_libdl_later(tmp_path: Path) -> None:
    """As before glibc 2.34 an NSS module does it in a program that started without."""
    old = debs.unpack("bullseye", "libc6", "libc6-dev", "linux-libc-dev", "dash") / "lib/x86_64-linux-gnu"
    module, program = tmp_path / "module.so", tmp_path / "program"
    subprocess.run(["gcc", "-shared", "-fPIC", "-nostdlib", "-o", module, HERE / "late_module.c", old / "libdl.so.2",
                    old / "libc.so.6"], check=True)
    subprocess.run(["gcc", "-fPIE", "-pie", "-nostartfiles", "-nostdlib", "-fno-stack-protector", "-o", program,
                    HERE / "late_program.c", old / "libc.so.6"], check=True)
    for preloaded in ([], ["--preload", LIBRARY]):
        done = subprocess.run([old / "ld-2.31.so", "--library-path", old, *preloaded, program, module], check=False)
        assert done.returncode == 0
