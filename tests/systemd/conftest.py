"""A guest for each module, and containers on it."""

from collections.abc import Iterator

import pytest
from nspawn_host import Container, Host, SystemdBundles, go_on, installed


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    with installed(tmp_path_factory.mktemp("systemd")) as one:
        yield one


@pytest.fixture
def containers(host: Host) -> Iterator[SystemdBundles]:
    with host.containers() as some:
        yield some


@pytest.fixture
def pair(containers: SystemdBundles) -> tuple[Container, Container]:
    """Two containers at work with weights 1 and 2."""
    one, two = (containers.start(name, f"ALIYUN_COM_GPU_SCHD_WEIGHT={weight}") for name, weight in (("a", 1), ("b", 2)))
    go_on(one, two)
    return one, two
