"""A DataLoader whose workers are forked from a process that uses the device already, with pinned batches.

Prints key=value lines that test_torch.py reads.
"""

import multiprocessing
import os

import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):  # type: ignore[type-arg]
    """Item i is i, and the process that made it."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        return torch.full((1024,), i), os.getpid()


def main() -> None:
    multiprocessing.set_start_method("fork")
    torch.zeros(1, device="cuda")
    right, workers, pinned = 0, set(), True
    loader = DataLoader(Numbers(), batch_size=16, num_workers=2, pin_memory=True)
    for batch, (numbers, pids) in enumerate(loader):
        pinned &= numbers.is_pinned()
        workers |= set(pids.tolist())
        there = numbers.to("cuda", non_blocking=True)
        torch.cuda.synchronize()
        right += int((there.cpu()[:, 0] == torch.arange(16 * batch, 16 * batch + 16)).sum())
    print(f"right={right}", f"workers={len(workers - {os.getpid()})}", f"pinned={pinned}", sep="\n")


main()
