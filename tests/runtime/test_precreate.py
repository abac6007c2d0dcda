"""`cgpu-runtime precreate`, as podman calls it: a configuration comes in, and the one to use goes out."""

import json

import pytest
from oci import PRECREATE, Bench, StandIn

ASKS = "ALIYUN_COM_GPU_MEM_CONTAINER=6"


def test_what_does_not_concern_us_comes_back_and_nobody_is_asked(bench: Bench) -> None:
    text = bench.spec("NVIDIA_VISIBLE_DEVICES=all") + "\n "
    done = bench("precreate", stdin=text)
    assert (done.returncode, done.stdout, done.stderr) == (0, text, "")
    assert bench.went_on() is None


def test_what_is_none_of_ours_after_all_comes_back(bench: Bench, daemon: StandIn) -> None:
    text = bench.spec("CGPU_DISABLE=true", ASKS)
    assert bench("precreate", stdin=text).stdout == text
    assert daemon.asked == [(PRECREATE, b"", text)]


@pytest.mark.parametrize("size", [0, 300_000])
def test_the_daemons_configuration_comes_instead(bench: Bench, daemon: StandIn, size: int) -> None:
    text = bench.spec(ASKS, "MORE=" + "x" * size)
    daemon.status, daemon.spec = 1, json.dumps({"new": "y" * size}).encode()
    done = bench("precreate", stdin=text)
    assert (done.returncode, done.stdout.encode(), done.stderr) == (0, daemon.spec, "")
    assert daemon.asked == [(PRECREATE, b"", text)]


def test_a_refusal_fails_and_prints_no_configuration(bench: Bench, daemon: StandIn) -> None:
    daemon.status, daemon.text = -22, "config.json is not valid JSON"
    done = bench("precreate", stdin=bench.spec(ASKS))
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "cgpu: config.json is not valid JSON\n")


def test_without_a_daemon_it_fails(bench: Bench) -> None:
    done = bench("precreate", stdin=bench.spec(ASKS))
    assert (done.returncode, done.stdout) == (1, "")
    assert "cgpud cannot be asked" in done.stderr


def test_too_much_is_refused(bench: Bench, daemon: StandIn) -> None:
    done = bench("precreate", stdin="x" * ((16 << 20) + 1))
    assert (done.returncode, done.stdout) == (1, "")
    assert "more than 16777216 bytes" in done.stderr
    assert daemon.asked == []
