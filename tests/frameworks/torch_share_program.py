"""Two PyTorch processes share a tensor on the device: by CUDA IPC, or with expandable segments by exported VMM handles.

Prints key=value lines that test_torch.py reads.
"""

import torch
import torch.multiprocessing as mp

MIB = 1 << 20
COUNT = 32 * MIB // 8


def receive(tensors: "mp.SimpleQueue[torch.Tensor]", answers: "mp.SimpleQueue[object]") -> None:
    tensor = tensors.get()
    right = bool((tensor.cpu() == torch.arange(COUNT)).all())
    free = torch.cuda.mem_get_info()[0]
    tensor.copy_(torch.arange(COUNT, 2 * COUNT))
    torch.cuda.synchronize()
    del tensor
    answers.put((right, free))


def main() -> None:
    context = mp.get_context("spawn")
    tensors, answers = context.SimpleQueue(), context.SimpleQueue()
    shared = torch.empty(COUNT, dtype=torch.int64, device="cuda")
    shared.copy_(torch.arange(COUNT))
    torch.cuda.synchronize()
    before = torch.cuda.mem_get_info()[0]
    child = context.Process(target=receive, args=(tensors, answers))
    child.start()
    tensors.put(shared)
    right, free = answers.get()
    child.join()
    print(f"exit={child.exitcode}", f"received={right}", f"counted_twice={before - free >= COUNT * 8}", sep="\n")
    print(f"returned={bool((shared.cpu() == torch.arange(COUNT, 2 * COUNT)).all())}")
    print(f"after={torch.cuda.mem_get_info()[0] - before}")


if __name__ == "__main__":
    main()
