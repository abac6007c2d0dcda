"""What the figures must be, cell by cell. On the simulated device, against the bare device of the same run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Must:
    sign: str
    """``<=`` or ``>=``."""
    bound: float

    def holds(self, value: float) -> bool:
        return value <= self.bound if self.sign == "<=" else value >= self.bound

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


PAIR, FIVE = [1, 2], [1, 2, 3, 4, 5]

FIXED = {
    "alloc_added_ns": Must("<=", 100),
    "free_added_ns": Must("<=", 60),
    "start_300_ratio": Must("<=", 2),
    "longest_gap_cycles": Must("<=", 2),
    "device_use_bursty": Must(">=", 97),
    "asked_got_bursty": Must(">=", 99),
    "ratio_error_loaded": Must("<=", 5),
    "device_use_loaded": Must(">=", 93),
    "share_error_fixed": Must("<=", 1),
    "highprio_share": Must("<=", 0.91),
    "highprio_delivered": Must(">=", 0.85),
    "scheduler_growth": Must("<=", 1.5),
    "kill_to_next_ms": Must("<=", 10),
    "stop_to_next_ms": Must("<=", 60),
    "idle_cpu": Must("<=", 0.5),
    "idle_memory": Must("<=", 80),
    "soak_failed": Must("<=", 0),
    "soak_lost_writes": Must("<=", 0),
    "soak_wrong": Must("<=", 0),
    "soak_ratio_error": Must("<=", 2),
}


def must(name: str, params: dict[str, object], baseline: float | None = None) -> Must | None:
    """The bound for this cell, None where it is only reported; some are a multiple of the ``baseline``."""
    match name:
        case "launch_added_ns":
            return Must("<=", 5) if params["limit"] else None
        case "ratio_error":
            return ratio_error(params)
        case "device_use":
            return Must(">=", 98.5 if params["sync"] else 99)
        case "docker_added_ms":
            return Must("<=", 150 if params["asks"] else 60)
        case "handover_us":
            return Must("<=", round(4 * baseline, 4)) if params["percentile"] == 50 and baseline else None
        case "highprio_latency_us":
            kernel = params["kernel_us"]
            assert isinstance(kernel, int)
            return Must("<=", 1000 + kernel) if params["percentile"] == 50 and kernel <= 1000 else None
        case "scheduler_core":
            return Must("<=", 5) if (params["gpus"], params["containers"]) == (8, 25) else None
        case "read_us":
            return Must("<=", round(baseline * (1 if params["clients"] == 1 else 1.5), 4)) if baseline else None
        case "soak_longest_wait_ms":
            return Must("<=", 1000) if params["of"] == "files" else None
        case "soak_growth":
            return Must("<=", 1024) if params["what"] == "memory" else Must("<=", 1)
    return FIXED.get(name)


def ratio_error(params: dict[str, object]) -> Must | None:
    kernel = params["kernel_us"]
    longest = max(kernel) if isinstance(kernel, list) else kernel
    assert isinstance(longest, int)
    if params["weights"] == PAIR:
        return Must("<=", 1)
    if params["weights"] == FIVE and longest <= 10_000:
        return Must("<=", 2)
    return None
