"""The real driver libraries behind our proxies, without a GPU.

Skipped unless ``CGPU_TEST_REAL_DRIVER`` is set: to a folder with libcuda.so.1 and libnvidia-ml.so.1, or to
``download``, which fetches Debian's packages (non-free, not ours to ship) with a package configuration of its own into
a temporary folder, and NVIDIA's CUDA runtimes from PyPI.
"""

import os
from collections.abc import Iterable
from pathlib import Path

import conformance
import debian
import pytest
from conformance import Answer, Question
from driver_tools import FLAGS, SRC, gcc, run

from cgpusched.driver import elf, find, proxy

WANTED = os.environ.get("CGPU_TEST_REAL_DRIVER", "")
pytestmark = pytest.mark.skipif(not WANTED, reason="CGPU_TEST_REAL_DRIVER is not set")


def download(series: str, folder: Path) -> Path:
    """Debian's libcuda1 and libnvidia-ml1 of that series, unpacked; gives the folder of the libraries."""
    debian.download(series, folder, "libcuda1", "libnvidia-ml1")
    return folder / "usr/lib/x86_64-linux-gnu/nvidia/current"


@pytest.fixture(scope="session", params=list(debian.SERIES) if WANTED == "download" else ["named"])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> find.Driver:
    folder = Path(WANTED) if request.param == "named" else download(request.param, tmp_path_factory.mktemp("nonfree"))
    found = find.find_driver(folder)
    assert found
    return found


def test_the_proxies_offer_the_same_functions(driver: find.Driver, hook: Path, tmp_path: Path) -> None:
    proxy.install_proxies(driver, tmp_path / "lib", hook)
    for real, name in ((driver.cuda, find.CUDA), (driver.nvml, find.NVML)):
        ours, theirs = elf.read(tmp_path / "lib" / name), elf.read(real)
        assert ours.functions == theirs.functions and len(ours.functions) > 300
        assert ours.soname == theirs.soname == name


def test_a_program_sees_the_same_driver(driver: find.Driver, hook: Path, tables: Path, tmp_path: Path) -> None:
    proxy.install_proxies(driver, tmp_path / "lib", hook)
    program, log = tmp_path / "compare", tmp_path / "log"
    gcc(SRC / "compare.c", "-o", program, *FLAGS, f"-I{tables}", "-ldl")
    real = run(program, driver.cuda, driver.nvml)
    assert real.startswith("cuInit ") and real.count("\n") > 600
    assert run(program, tmp_path / "lib" / find.CUDA, tmp_path / "lib" / find.NVML, env={"CGPU_LOG": str(log)}) == real
    assert not log.exists(), log.read_text()


# ---- cuGetProcAddress ----

Answers = dict[tuple[str, Question], Answer]


class Both:
    """The driver, bare and behind the hook that is shipped."""

    def __init__(self, driver: find.Driver, folder: Path) -> None:
        self.driver, self.folder = driver, folder
        self.lib = folder / "lib"
        proxy.install_proxies(driver, self.lib)
        self.exports = conformance.symbols(driver.cuda, "-D")
        wrappers = conformance.symbols(self.lib / "libcgpu-hook.so.1")
        self.wraps = {at: name.removeprefix("wrap_") for at, names in wrappers.items() for name in names
                      if name.startswith("wrap_cu")}
        assert len(self.exports) > 500 and len(self.wraps) > 100

    def ask(self, questions: Iterable[Question]) -> tuple[Answers, Answers]:
        """Theirs, ours."""
        asked = sorted(set(questions))
        log = self.folder / "log"
        theirs = conformance.ask(self.driver.cuda, asked, self.folder)
        ours = conformance.ask(self.lib / find.CUDA, asked, self.folder, CGPU_LOG=str(log))
        assert len(theirs) == 3 * len(asked) and theirs.keys() == ours.keys()
        return theirs, ours

    def differs(self, question: Question, theirs: Answer, ours: Answer) -> str:
        """What is wrong with our answer, or nothing."""
        if (theirs.result, theirs.status) != (ours.result, ours.status):
            return "another result or status"
        names = self.exports.get(theirs.function, set())
        wrapped = self.wraps.get(ours.function)
        if wrapped is None:
            if theirs.function != ours.function:
                return "another function of the driver's"
            return "not wrapped" if names & set(self.wraps.values()) else ""
        if names:
            return "" if wrapped in names else f"the wrapper of {wrapped}, not of {names}"
        expected = conformance.table_export(question)  # in no export: what the table says it is
        return "" if wrapped == expected else f"the wrapper of {wrapped}, not of {expected}"

    def compare(self, questions: Iterable[Question]) -> Answers:
        theirs, ours = self.ask(questions)
        wrong = {key: difference for key in theirs if (difference := self.differs(key[1], theirs[key], ours[key]))}
        assert not wrong, f"{len(wrong)} of {len(theirs)}, such as {list(wrong.items())[:20]}"
        return theirs


@pytest.fixture(scope="session")
def both(driver: find.Driver, tmp_path_factory: pytest.TempPathFactory) -> Both:
    return Both(driver, tmp_path_factory.mktemp("both"))


def test_every_name_version_and_flag_is_answered_as_the_driver_does(both: Both) -> None:
    """The table's names, and whatever the driver exports (GL, EGL and VDPAU too), with and without suffix."""
    rows = [row for row, _ in conformance.table()]
    exports = {name for names in both.exports.values() for name in names if name.startswith("cu")}
    names = {row.name for row in rows} | exports | set(map(conformance.suffixless, exports)) | {"", "cuNoSuchName"}
    assert {"cuGLMapBufferObjectAsync", "cuGraphicsEGLRegisterImage", "cuVDPAUCtxCreate"} <= names
    introduced = {row.version for row in rows}
    versions = introduced | {version - 1 for version in introduced} | {0, 13050, 1 << 30, -1}
    flags = range(5)  # 1 the legacy stream, 2 per thread; no others are defined
    theirs = both.compare(Question(name, version, flag) for name in names for version in versions for flag in flags)
    found = sum(answer.function != "-" for answer in theirs.values())
    assert len(theirs) // 4 < found < len(theirs), "some are there, some are not"


def test_nothing_that_is_in_the_headers_is_called_unknown(both: Both) -> None:
    both.compare(row for row, _ in conformance.table())
    log = both.folder / "log"
    assert not log.exists() or "unknown" not in log.read_text()


@pytest.fixture(scope="session", params=conformance.RUNTIMES)
def lookups(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Question]:
    if WANTED != "download":
        pytest.skip("CGPU_TEST_REAL_DRIVER is not `download`: NVIDIA's CUDA runtimes are fetched from PyPI")
    return conformance.lookups(request.param, tmp_path_factory.mktemp("runtime"))


def test_what_cudart_asks_is_answered_at_the_right_version(both: Both, lookups: list[Question]) -> None:
    """As the driver itself does; and by the variant that the table names, unless the driver is older than that."""
    assert len(lookups) > 350 and any(one.flags == 2 for one in lookups)
    theirs = both.compare(lookups)
    exports = {name for names in both.exports.values() for name in names}
    answered = 0
    for question in lookups:
        answer = theirs["v2", question]
        expected = conformance.table_export(question)
        if answer.function == "-":
            assert expected not in exports, f"{question}: the driver has {expected} and does not answer with it"
        elif expected in exports:
            assert expected in both.exports[answer.function], f"{question}: {both.exports[answer.function]}"
            answered += 1
    assert answered > 300
