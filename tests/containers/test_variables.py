"""What a container's environment asks for: the rules and every published figure."""

import pytest

from cgpusched.containers.variables import Ask, Card, Off, ask
from cgpusched.errors import UserError

MIB = 1 << 20
CONTAINER, DEV = "ALIYUN_COM_GPU_MEM_CONTAINER", "ALIYUN_COM_GPU_MEM_DEV"
WEIGHT, PRIORITY = "ALIYUN_COM_GPU_SCHD_WEIGHT", "ALIYUN_COM_GPU_HIGH_PRIO"
OURS, NVIDIA = "ALIYUN_COM_GPU_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"


def uuid(index: int) -> str:
    return f"GPU-0000000{index}-aaaa-2222-3333-444444444444"


def cards(count: int = 1, mebibytes: int = 15109, rest: int = 0) -> list[Card]:
    return [Card(index, uuid(index), mebibytes * MIB + rest) for index in range(count)]


def env(**values: object) -> list[str]:
    """Short names for the variables: see NAMES."""
    return ["PATH=/bin", *(f"{NAMES.get(key, key)}={value}" for key, value in values.items())]


NAMES = {"container": CONTAINER, "dev": DEV, "weight": WEIGHT, "high": PRIORITY, "ours": OURS, "nvidia": NVIDIA,
         "unit": "ALIYUN_COM_GPU_MEM_UNIT", "disable": "CGPU_DISABLE"}  # fmt: skip


def asked(count: int = 4, mebibytes: int = 23028, **values: object) -> Ask:
    found = ask(env(**values), cards(count, mebibytes))
    assert isinstance(found, Ask), found
    return found


def mebibytes(found: Ask) -> list[int]:
    assert all(size % MIB == 0 for size in found.memsize)
    return [size // MIB for size in found.memsize]


def refused(count: int = 4, **values: object) -> str:
    with pytest.raises(UserError) as caught:
        ask(env(**values), cards(count, 23028))
    text = str(caught.value)
    assert "\n" not in text and len(text) < 400
    return text


@pytest.mark.parametrize(("total", "container", "dev", "shown"), [
    (15109, 6, 15, 6043),  # T4
    (23028, 3, 23, 3003), (23028, 4, 23, 4004), (23028, 5, 23, 5006), (23028, 6, 23, 6007), (23028, 8, 22, 8373),  # A10
    (16130, 3, 15, 3226), (16130, 2, 15, 2150),  # V100
    (15360, 3, 15, 3072),  # T4
    (15109, 15, 15, 15109), (16130, 1, 16130, 1), (24, 1, 24, 1),
])  # fmt: skip
def test_published_memory(total: int, container: int, dev: int, shown: int) -> None:
    assert mebibytes(asked(1, total, container=container, dev=dev)) == [shown]


def test_a_card_that_is_not_whole_mebibytes() -> None:
    """NVML gives bytes, nvidia-smi shows them rounded down."""
    found = ask(env(container=6, dev=15), cards(1, 15109, rest=MIB - 1))
    assert isinstance(found, Ask) and mebibytes(found) == [6043]


@pytest.mark.parametrize(("text", "sizes"), [
    ("3", [3003] * 4),
    ("3,1", [3003, 1001, 1001, 1001]),
    ("3,4,5,6", [3003, 4004, 5006, 6007]),
    ("3,4,5", [3003, 4004, 5006, 5006]),
])  # fmt: skip
def test_lists(text: str, sizes: list[int]) -> None:
    found = asked(container=text, dev=23)
    assert found.gpus == (0, 1, 2, 3) and mebibytes(found) == sizes
    assert (found.weight, found.highprio, found.visible, found.native) == (None, False, "all", ())


@pytest.mark.parametrize("values", [
    {}, {"dev": 23}, {"container": "0", "dev": 23}, {"container": "1,0,0", "dev": 23}, {"container": "0"},
    {"disable": "1"}, {"container": "0", "disable": "TRUE"}, {"disable": "false"},
    {"ours": "9"}, {"unit": "parsec"}, {"nvidia": "all"},
])  # fmt: skip
def test_off(values: dict[str, object]) -> None:
    found = ask(env(**values), cards(4))
    assert isinstance(found, Off) and found.reason and found.warning is None


@pytest.mark.parametrize(("values", "named"), [
    ({"weight": 3}, [WEIGHT]), ({"high": 1}, [PRIORITY]), ({"weight": 99, "high": "x"}, [WEIGHT, PRIORITY]),
    ({"weight": 3, "container": "0", "dev": 15}, [WEIGHT]),
])  # fmt: skip
def test_a_weight_or_priority_alone_is_a_warning(values: dict[str, object], named: list[str]) -> None:
    found = ask(env(**values), cards(4))
    assert isinstance(found, Off) and found.warning is not None
    assert all(name in found.warning for name in named) and CONTAINER in found.warning


@pytest.mark.parametrize("values", [
    {"container": "3", "dev": 23, "disable": "true"}, {"container": "3", "dev": 23, "disable": "1"},
    {"container": "3", "dev": 23, "disable": "TRUE"}, {"container": "abc", "disable": "true"},
])  # fmt: skip
def test_disabled_though_it_asks_is_a_warning_or_does_not_count(values: dict[str, object]) -> None:
    found = ask(env(**values), cards(4))
    assert isinstance(found, Off) and found.warning is not None and "though " + CONTAINER in found.warning
    if values["container"] == "abc":
        with pytest.raises(UserError, match="'abc'"):
            ask(env(**values), cards(4), ignore_disable=True)
    else:
        found = ask(env(**values), cards(4), ignore_disable=True)
        assert isinstance(found, Ask) and found.gpus == (0, 1, 2, 3)
    assert isinstance(ask(env(disable="1"), cards(4), ignore_disable=True), Off), "it asks for nothing"


@pytest.mark.parametrize("disable", ["false", "0", ""])
def test_not_disabled(disable: str) -> None:
    assert asked(container=3, dev=23, disable=disable).gpus == (0, 1, 2, 3)


@pytest.mark.parametrize("unit", ["GiB", "MiB"])
def test_known_units(unit: str) -> None:
    assert mebibytes(asked(container=3, dev=23, unit=unit)) == [3003] * 4


def test_weight_and_priority() -> None:
    found = asked(container=3, dev=23, weight=20, high=1)
    assert (found.weight, found.highprio) == (20, True)
    assert asked(container=3, dev=23, high=0).highprio is False


def test_the_last_of_several_entries_counts() -> None:
    entries = [f"{CONTAINER}=abc", f"{CONTAINER}=3", f"{DEV}=1", f"{DEV}=23", "no equals sign", f"{NVIDIA}=9",
               f"{NVIDIA}=1"]
    found = ask(entries, cards(2, 23028))
    assert isinstance(found, Ask) and (found.gpus, found.visible, mebibytes(found)) == ((1,), "1", [3003])


# Which GPUs


@pytest.mark.parametrize(("ours", "nvidia", "shared", "native", "visible"), [
    (None, None, (0, 1, 2, 3), (), "all"),
    (None, "all", (0, 1, 2, 3), (), "all"),
    (None, "2", (2,), (), "2"),
    (None, "3,1", (3, 1), (), "3,1"),
    (None, uuid(2), (2,), (), uuid(2)),
    ("2", None, (2,), (), "2"),
    ("2", "all", (2,), (), "2"),
    ("2", "void", (2,), (), "2"),
    ("2", "", (2,), (), "2"),
    ("all", None, (0, 1, 2, 3), (), "all"),
    ("all", "0,1,2,3", (0, 1, 2, 3), (), "0,1,2,3"),
    (f"{uuid(3)},1", None, (3, 1), (), f"{uuid(3)},1"),
    (uuid(0).upper().replace("GPU", "gpu"), None, (0,), (), uuid(0).upper().replace("GPU", "gpu")),
    ("2", "0,1,2", (2,), (0, 1), "0,1,2"),  # the documented mixed mode
    ("2,0", "0,1,2", (2, 0), (1,), "0,1,2"),
    (uuid(2), "0,2", (2,), (0,), "0,2"),
    ("0,2", f"0,{uuid(2)}", (0, 2), (), f"0,{uuid(2)}"),
])  # fmt: skip
def test_visible_devices(
    ours: str | None, nvidia: str | None, shared: tuple[int, ...], native: tuple[int, ...], visible: str
) -> None:
    values = {key: value for key, value in (("ours", ours), ("nvidia", nvidia)) if value is not None}
    found = asked(container=3, dev=23, **values)
    assert (found.gpus, found.native, found.visible) == (shared, native, visible)


def test_memory_lists_count_the_shared_gpus() -> None:
    found = asked(container="3,6", dev=23, ours="2,0", nvidia="0,1,2")
    assert dict(zip(found.gpus, mebibytes(found), strict=True)) == {2: 3003, 0: 6007}


def test_devices_of_a_cdi_specification() -> None:
    assert asked(container=3, dev=23, CGPU_CDI_DEVICE_2=1, CGPU_CDI_DEVICE_0=1).gpus == (0, 2)
    assert asked(container=3, dev=23, CGPU_CDI_DEVICE_2=1, ours="1").gpus == (1,)
    assert asked(container=3, dev=23, CGPU_CDI_DEVICE_2=1, nvidia="void").visible == "2"
    assert "'7' is no GPU" in refused(container=3, dev=23, CGPU_CDI_DEVICE_7=1)


# Bad input: the container must not start


@pytest.mark.parametrize(("values", "words"), [
    ({"container": "abc", "dev": 23}, [f"{CONTAINER}='abc'", "an integer"]),
    ({"container": "-1", "dev": 23}, [f"{CONTAINER}='-1'", "an integer"]),
    ({"container": "", "dev": 23}, [f"{CONTAINER}=''"]),
    ({"container": "3.5", "dev": 23}, [f"{CONTAINER}='3.5'"]),
    ({"container": "3GiB", "dev": 23}, [f"{CONTAINER}='3GiB'"]),
    ({"container": "03", "dev": 23}, [f"{CONTAINER}='03'"]),
    ({"container": "3, 4", "dev": 23}, [f"{CONTAINER}='3, 4'"]),
    ({"container": "3,", "dev": 23}, [f"{CONTAINER}='3,'"]),
    ({"container": "1,abc,0", "dev": 23}, [f"{CONTAINER}='1,abc,0'"]),
    ({"container": "\u0663", "dev": 23}, [CONTAINER]),
    ({"container": "7", "dev": "6"}, [f"{CONTAINER}='7'", "at most the 6", DEV]),
    ({"container": "3,7", "dev": "6"}, [f"{CONTAINER}='3,7'", "at most the 6"]),
    ({"container": "6"}, [f"{DEV} is not set"]),
    ({"container": "6", "dev": ""}, [f"{DEV}=''", "an integer 1-"]),
    ({"container": "6", "dev": "0"}, [f"{DEV}='0'", "an integer 1-"]),
    ({"container": "6", "dev": "15,16"}, [f"{DEV}='15,16'"]),
    ({"container": "1", "dev": "100000"}, [f"{CONTAINER}=1", "less than 1 MiB", "at least that"]),
    ({"container": "3", "dev": 23, "ours": "4"}, [f"{OURS}='4'", "no GPU", "0,1,2,3"]),
    ({"container": "3", "dev": 23, "ours": "GPU-ffffffff-1111-2222-3333-444444444444"}, [OURS, "no GPU"]),
    ({"container": "3", "dev": 23, "ours": "1,1"}, [f"{OURS}='1,1'", "named twice"]),
    ({"container": "3", "dev": 23, "ours": f"1,{uuid(1)}"}, [OURS, "named twice"]),
    ({"container": "3", "dev": 23, "ours": ""}, [f"{OURS}=''"]),
    ({"container": "3", "dev": 23, "ours": "none"}, [f"{OURS}='none'"]),
    ({"container": "3", "dev": 23, "nvidia": "4"}, [f"{NVIDIA}='4'", "no GPU"]),
    ({"container": "3", "dev": 23, "nvidia": "none"}, [f"{NVIDIA}='none'"]),
    ({"container": "3", "dev": 23, "nvidia": "void"}, [f"{NVIDIA}='void'"]),
    ({"container": "3", "dev": 23, "nvidia": ""}, [f"{NVIDIA}=''"]),
    ({"container": "3", "dev": 23, "ours": "2", "nvidia": "0,1"}, [f"{OURS}='2'", f"{NVIDIA}='0,1'", "GPU 2"]),
    ({"container": "3", "dev": 23, "ours": "2", "nvidia": "none"}, [OURS, f"{NVIDIA}='none'"]),
    ({"container": "3,3,3,3,3", "dev": 23}, [f"{CONTAINER}='3,3,3,3,3'", "4 shared GPUs"]),
    ({"container": "3,3", "dev": 23, "ours": "1"}, [f"{CONTAINER}='3,3'", "1 shared GPUs"]),
    ({"container": "3", "dev": 23, "weight": "0"}, [f"{WEIGHT}='0'", "an integer 1-20"]),
    ({"container": "3", "dev": 23, "weight": "99"}, [f"{WEIGHT}='99'", "an integer 1-20"]),
    ({"container": "3", "dev": 23, "weight": "1_0"}, [f"{WEIGHT}='1_0'"]),
    ({"container": "3", "dev": 23, "high": "2"}, [f"{PRIORITY}='2'", "an integer 0-1"]),
    ({"container": "3", "dev": 23, "high": "yes"}, [f"{PRIORITY}='yes'"]),
    ({"container": "3", "dev": 23, "unit": "GB"}, ["ALIYUN_COM_GPU_MEM_UNIT='GB'", "GiB"]),
    ({"container": "3", "dev": 23, "disable": "yes"}, ["CGPU_DISABLE='yes'", "true or 1"]),
])  # fmt: skip
def test_bad_values_are_one_clear_line(values: dict[str, object], words: list[str]) -> None:
    text = refused(**values)
    for word in words:
        assert word in text, text


def test_the_weights_limit_is_the_smallest_of_its_gpus() -> None:
    two = [Card(0, uuid(0), 100 * MIB, max_inst=20), Card(1, uuid(1), 100 * MIB, max_inst=4)]
    with pytest.raises(UserError, match="an integer 1-4 is allowed"):
        ask(env(container=1, dev=2, weight=5), two)
    assert isinstance(ask(env(container=1, dev=2, weight=5, ours="0"), two), Ask)


def test_a_node_without_gpus() -> None:
    with pytest.raises(UserError, match="has no GPU"):
        ask(env(container=1, dev=2), [])
