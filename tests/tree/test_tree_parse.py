"""The control files' parsers: strict, and total (a value or one line that says what is allowed)."""

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgpufs import nodes, parse
from cgpusched.commands import Create, Destroy
from cgpusched.errors import UserError
from cgpusched.model import Instance, Share
from cgpusched.units import NODE_NAMES

PARSERS = [lambda data: parse.integer(data, 0, 99), parse.size, parse.upgrade, parse.inst_ctl]


@pytest.mark.parametrize(("what", "data"), oracle.malformed())
def test_malformed(what: str, data: bytes) -> None:
    for parser in PARSERS:
        with pytest.raises(UserError) as caught:
            parser(data)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400


@given(st.binary(max_size=200) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_total(data: bytes) -> None:
    for parser in PARSERS:
        try:
            parser(data)
        except UserError as error:
            assert str(error).isprintable()


@given(st.integers(0, 99), st.text(" \t\n", max_size=5), st.text(" \t\n", max_size=5))
def test_integer(value: int, before: str, after: str) -> None:
    assert parse.integer(f"{before}{value}{after}".encode(), 0, 99) == value


@given(st.integers(0, 2000), st.sampled_from("KMGT"), st.sampled_from(["", "iB"]))
def test_size(value: int, unit: str, suffix: str) -> None:
    assert parse.size(f"{value}{unit}{suffix}\n".encode()) == value * 1024 ** ("KMGT".index(unit) + 1)


@pytest.mark.parametrize(("line", "command"), [
    ("create a", Create("a")),
    ("  create\ta   memsize=1K\n\n", Create("a", memsize=(1024,))),
    ("create a gpu=1,0 memsize=3GiB,4GiB weight=2 highprio=1",
     Create("a", (1, 0), (3 << 30, 4 << 30), 2, True)),
    ("create a highprio=0 weight=0 gpu=3", Create("a", (3,), None, 0, False)),
    ("create " + "x" * 128, Create("x" * 128)),
    ("create 0", Create("0")),
    ("destroy a.b_c-d", Destroy("a.b_c-d")),
])  # fmt: skip
def test_inst_ctl(line: str, command: object) -> None:
    assert parse.inst_ctl(line.encode()) == command


@pytest.mark.parametrize("line", [
    "create " + "x" * 129, "create " + "x" * 300, "destroy " + "x" * 129, "create a\ndestroy a", "createa", "create=a",
    "create a  gpu = 0",
])  # fmt: skip
def test_inst_ctl_refused(line: str) -> None:
    with pytest.raises(UserError):
        parse.inst_ctl(line.encode())


def test_reading_is_what_create_takes() -> None:
    instance = Instance("x.1", {2: Share(5, 3, True), 0: Share(7, 3, True)})
    line = nodes.describe(instance)
    assert line == "x.1 gpu=2,0 memsize=5,7 weight=3 highprio=1"
    assert parse.inst_ctl(f"create {line}".encode()) == Create("x.1", (2, 0), (5, 7), 3, True)


def test_the_reserved_ids_are_the_nodes() -> None:
    assert {node.name for node in nodes.NODES} == NODE_NAMES
