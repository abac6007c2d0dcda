"""The table of policies, row by row, and what it entitles everyone to."""

import pytest

from cgpusched.model import GpuSettings, Policy, Share
from cgpusched.plan import UNIT_SLICE_NS, GpuPlan, Turn
from cgpusched.policy import entitled, plan

S = UNIT_SLICE_NS


def of(policy: int, *shares: tuple[str, int] | tuple[str, int, bool], busy: str = "", **settings: int) -> GpuPlan:
    made = [(ident, Share(1 << 30, weight, bool(high))) for ident, weight, *high in shares]
    return plan(GpuSettings(Policy(policy), **settings), made, set(busy))


def percents(made: GpuPlan) -> dict[str, float]:
    return {ident: round(percent, 2) for ident, percent in made.entitled.items()}


def quanta(made: GpuPlan) -> list[int]:
    return [turn.quantum_ns // S for turn in made.turns]


def test_0_fair_share_is_one_of_max_inst_always() -> None:
    made = of(0, ("a", 1), ("b", 7), max_inst=20, busy="a")
    assert made == GpuPlan((Turn("a", S), Turn("b", S)), 18 * S, skip_idle=False)
    assert percents(made) == {"a": 5, "b": 5}
    assert percents(of(0, ("a", 1), max_inst=4)) == {"a": 25}


def test_1_preemptive_shares_among_those_that_use_the_gpu() -> None:
    made = of(1, ("a", 1), ("b", 7), busy="ab")
    assert made == GpuPlan((Turn("a", S), Turn("b", S)), skip_idle=True)
    assert percents(made) == {"a": 50, "b": 50}
    assert percents(of(1, ("a", 1), ("b", 1), busy="a"))["a"] == 100  # one alone gets all


def test_1_an_idle_instance_is_shown_what_it_would_get() -> None:
    assert percents(of(1, ("a", 1), ("b", 1), ("c", 1), busy="ab")) == {"a": 50, "b": 50, "c": 33.33}
    assert percents(of(1, ("a", 1), ("b", 1))) == {"a": 100, "b": 100}


@pytest.mark.parametrize("busy", ["", "a", "b", "ab"])
def test_2_weighted_counts_the_existing_and_the_idle_consume(busy: str) -> None:
    made = of(2, ("a", 1), ("b", 2), busy=busy)
    assert made == GpuPlan((Turn("a", S), Turn("b", 2 * S)), skip_idle=False)
    assert percents(made) == {"a": 33.33, "b": 66.67}


def test_2_switches_four_times_as_often_at_2_to_1_as_at_8_to_4() -> None:
    fast, slow = of(2, ("a", 2), ("b", 1)), of(2, ("a", 8), ("b", 4))
    assert sum(quanta(slow)) == 4 * sum(quanta(fast))
    assert fast.entitled == slow.entitled


def test_3_fixed_is_weight_of_max_inst_always() -> None:
    made = of(3, ("a", 1), ("b", 3), max_inst=20, busy="b")
    assert made == GpuPlan((Turn("a", S), Turn("b", 3 * S)), 16 * S, skip_idle=False)
    assert percents(made) == {"a": 5, "b": 15}


@pytest.mark.parametrize("core", range(5, 105, 5))
def test_3_gpu_core_percentage_in_steps_of_5(core: int) -> None:
    """aliyun.com/gpu-core.percentage is weight = percent / 5 at max_inst 20."""
    assert percents(of(3, ("pod", core // 5), max_inst=20)) == {"pod": core}


def test_4_soft_is_1_without_the_drain() -> None:
    made = of(4, ("a", 1), ("b", 7), busy="ab")
    assert made == GpuPlan((Turn("a", S), Turn("b", S)), skip_idle=True, drain=False)
    assert percents(made) == {"a": 50, "b": 50}


def test_5_native() -> None:
    made = of(5, ("a", 1), ("b", 0), busy="a")
    assert made.native and quanta(made) == [1, 0]
    assert percents(made) == {"a": 100, "b": 0}


@pytest.mark.parametrize("policy", Policy)
def test_weight_0_is_paused_under_every_policy_and_priority(policy: Policy) -> None:
    made = of(policy, ("a", 0), ("b", 1), ("c", 0, True), max_inst=4, busy="abc")
    assert quanta(made) == [0, 1, 0]
    assert (made.entitled["a"], made.entitled["c"]) == (0, 0)


def test_the_slice_of_a_paused_instance_passes_unused_where_slices_are_fixed() -> None:
    made = of(0, ("a", 0), ("b", 1), max_inst=4)
    assert (quanta(made), made.unowned_ns) == ([0, 1], 3 * S)
    assert percents(made) == {"a": 0, "b": 25}


@pytest.mark.parametrize("policy", Policy)
def test_nobody(policy: Policy) -> None:
    made = of(policy, max_inst=4)
    assert (made.turns, made.entitled) == ((), {})
    assert made.unowned_ns == (4 * S if policy in (Policy.FAIR, Policy.FIXED) else 0)


# The published figures: one A10, weights 1:2, images/s


TENSORFLOW: list[tuple[float, float]] = [(151, 307), (204, 418), (247, 503), (257, 516)]
TENSORRT = [
    (568.05, 1132.08), (940.36, 1884.12), (1304.03, 2571.91), (1586.87, 3055.66),
    (1783.91, 3381.72), (1989.28, 3695.88), (2105.81, 3889.35), (2205.25, 3901.94),
]  # fmt: skip


@pytest.mark.parametrize(("first", "second"), TENSORFLOW + TENSORRT)
def test_the_published_ratio_is_what_policy_2_entitles_to(first: float, second: float) -> None:
    """The vendor's own runs drift from it by up to -11.5 % (TensorRT at batch 128), which ours must not."""
    shares = of(2, ("first", 1), ("second", 2)).entitled
    asked = shares["second"] / shares["first"]
    assert asked == pytest.approx(2)
    assert -0.116 < (second / first) / asked - 1 < 0.025


def test_the_published_table_of_two_pods() -> None:
    made = of(1, ("7db8fff70a0d", 1), ("91b1e19795ee", 1))
    assert entitled(made, {"7db8fff70a0d", "91b1e19795ee"}) == {"7db8fff70a0d": 50, "91b1e19795ee": 50}


# High priority


def test_busy_high_priority_takes_prio_ratio_and_leaves_the_rest_to_the_policy() -> None:
    assert percents(of(1, ("h", 1, True), ("a", 1), ("b", 1), busy="hab", prio_ratio=90)) == {"h": 90, "a": 5, "b": 5}
    assert percents(of(2, ("h", 1, True), ("a", 1), ("b", 3), busy="hab", prio_ratio=60)) == {"h": 60, "a": 10, "b": 30}
    assert percents(of(0, ("h", 1, True), ("a", 1), max_inst=4, busy="ha", prio_ratio=60)) == {"h": 60, "a": 10}
    assert percents(of(3, ("h", 1, True), ("a", 2), max_inst=4, busy="ha", prio_ratio=60)) == {"h": 60, "a": 20}


def test_idle_high_priority_is_left_out_and_gets_0() -> None:
    assert percents(of(1, ("h", 1, True), ("a", 1), ("b", 1), busy="ab")) == {"h": 0, "a": 50, "b": 50}
    assert percents(of(2, ("h", 9, True), ("a", 1), ("b", 3))) == {"h": 0, "a": 25, "b": 75}
    made = of(0, ("h", 1, True), ("a", 1), max_inst=4)
    assert (percents(made), made.unowned_ns) == ({"h": 0, "a": 25}, 3 * S)


@pytest.mark.parametrize("policy", list(Policy)[:5])
def test_high_priority_is_not_capped_where_nobody_else_has_work(policy: Policy) -> None:
    shares = (("h", 1, True), ("a", 1), ("paused", 0))
    assert of(policy, *shares, busy="h", prio_ratio=50, max_inst=4).entitled["h"] == 100
    made = plan(GpuSettings(policy, 4, 50), [("h", Share(1, 1, True)), ("paused", Share(1, 0))], {"h", "paused"})
    assert made.entitled == {"h": 100, "paused": 0}
    assert of(policy, *shares, busy="ha", prio_ratio=50, max_inst=4).entitled["h"] == 50


def test_several_of_high_priority_share_by_the_policy() -> None:
    several = (("g", 1, True), ("h", 2, True), ("a", 1))
    assert percents(of(1, *several, busy="gha", prio_ratio=90)) == {"g": 45, "h": 45, "a": 10}
    assert percents(of(2, *several, busy="gha", prio_ratio=90)) == {"g": 30, "h": 60, "a": 10}
    assert percents(of(2, *several, busy="ha", prio_ratio=90)) == {"g": 0, "h": 90, "a": 10}
    assert of(1, *several, prio_ratio=33).high_percent == 33


@pytest.mark.parametrize("policy", Policy)
def test_a_shut_instance_is_paused_and_says_why(policy: Policy) -> None:
    made = plan(GpuSettings(policy), [("a", Share(1, 2, shut=True)), ("b", Share(1))], ["a", "b"])
    turns = [(turn.id, turn.quantum_ns > 0, turn.shut) for turn in made.turns]
    assert turns == [("a", False, True), ("b", True, False)]
    assert made.entitled["a"] == 0
