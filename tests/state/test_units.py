"""What people type: sizes, integers, IDs, UUIDs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgpusched.errors import UserError
from cgpusched.units import NODE_NAMES, check_id, format_size, parse_integer, parse_size, show, uuid_bytes

MIB, GIB = 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("1", 1),
        ("6730809344", 6730809344),
        ("6610M", 6730809344 + 200278016),  # the published meminfo sample is exactly 6610 MiB
        ("6610MiB", 6610 * MIB),
        ("1K", 1024),
        ("1KiB", 1024),
        ("6GiB", 6 * GIB),
        ("512M", 512 * MIB),
        ("2T", 2 << 40),
        ("2TiB", 2 << 40),
        ("0G", 0),
        ("9223372036854775807", (1 << 63) - 1),
    ],
)
def test_sizes(text: str, value: int) -> None:
    assert parse_size(text) == value


BAD_NUMBERS = [
    "", " ", "\n", "1\n", " 7", "7 ", "+7", "-1", "1_0", "0x1", "007", "00", "1.5", "1e3", "1 2", "\x00", "٣", "１",
    "9" * 21, "9" * 5000, "9223372036854775808", "nan", "'1'",
]  # fmt: skip


@pytest.mark.parametrize("text", [*BAD_NUMBERS, "1B", "1GB", "1g", "1gib", "1Gib", "1 G", "G", "iB", "1iB", "1P", "1KK",
                                  "1GiBx", "07G", "+1G", "-1G", "1.5G", "8388608T", "1" + "0" * 19 + "T"])  # fmt: skip
def test_no_sizes(text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_size(text)
    assert show(text) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("text", [*BAD_NUMBERS, "1K"])
def test_no_integers(text: str) -> None:
    with pytest.raises(UserError):
        parse_integer(text)


def test_integer_range() -> None:
    assert parse_integer("0") == 0
    assert [parse_integer(text, 20, 99) for text in ("20", "99")] == [20, 99]
    for text in ("19", "100", "0"):
        with pytest.raises(UserError, match="20-99"):
            parse_integer(text, 20, 99)


@given(st.integers(0, (1 << 63) - 1))
def test_format_reads_back(value: int) -> None:
    assert parse_size(format_size(value)) == value


@given(st.integers(1, 9_999), st.sampled_from("KMGT"))
def test_format_is_short(count: int, unit: str) -> None:
    assert parse_size(f"{count}{unit}") == parse_size(f"{count}{unit}iB")
    assert len(format_size(parse_size(f"{count}{unit}"))) <= len(f"{count}{unit}iB")


@given(st.text())
def test_any_text_is_answered(text: str) -> None:
    for parse in (parse_size, parse_integer, check_id, uuid_bytes):
        try:
            parse(text)
        except UserError as error:
            assert str(error).isprintable()


@pytest.mark.parametrize("text", ["a", "A.b-c_9", "-", "_", "a..b", "7db8fff70a0d", "x" * 128, "policy2", "0"])
def test_ids(text: str) -> None:
    assert check_id(text) == text


@pytest.mark.parametrize("text", ["", ".", "..", ".a", "a/b", "../x", "a b", "a\n", "a\x00", "é", "x" * 129, "x" * 300,
                                  *sorted(NODE_NAMES)])  # fmt: skip
def test_no_ids(text: str) -> None:
    with pytest.raises(UserError, match="1-128"):
        check_id(text)


def test_no_node_has_the_name_of_an_instance_directory() -> None:
    """An ID is cut to 12 characters for its directory: none that is allowed may become a node's name by that."""
    assert all(len(name) != 12 for name in NODE_NAMES)


def test_uuid() -> None:
    assert uuid_bytes("GPU-00112233-4455-6677-8899-aabbccddeeFF").hex() == "00112233445566778899aabbccddeeff"


UUID = "00112233-4455-6677-8899-aabbccddeeff"


@pytest.mark.parametrize(
    "text", ["", "GPU-", UUID, "MIG-" + UUID, "GPU-" + UUID.replace("-", ""), "GPU-" + UUID[:-1] + "g", f"GPU-{UUID}\n"]
)
def test_no_uuid(text: str) -> None:
    with pytest.raises(UserError, match="GPU-"):
        uuid_bytes(text)


def test_show_is_one_short_line() -> None:
    assert show("a\nb") == r"'a\nb'"
    assert show("é") == r"'\xe9'"
    assert show(7) == "7"
    assert len(show("x" * 1_000_000)) == 62
