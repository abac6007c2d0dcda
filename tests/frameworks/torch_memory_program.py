"""PyTorch's memory: told the quota, allocates, gives back, and runs out of it. The allocator is PYTORCH_ALLOC_CONF's.

Prints key=value lines that test_torch.py reads.
"""

import sys

import torch

MIB = 1 << 20


def main() -> None:
    total = torch.cuda.mem_get_info()[1]
    print(f"backend={torch.cuda.get_allocator_backend()}", f"total={total}", sep="\n")
    print(f"properties={torch.cuda.get_device_properties(0).total_memory}")
    held = torch.arange(64 * MIB // 8, device="cuda")  # the kernel computes nothing
    held.copy_(torch.arange(len(held)))
    print(f"held={torch.cuda.mem_get_info()[0]}")
    assert (held.cpu() == torch.arange(len(held))).all()
    try:
        torch.empty(total + MIB, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        print("oom=" + " ".join(str(error).split()))
    else:
        sys.exit("allocated more than the quota")
    # what is left can still be had: an allocation refused costs nothing
    more = torch.empty(total - 256 * MIB, dtype=torch.uint8, device="cuda")
    print(f"full={torch.cuda.mem_get_info()[0]}")
    del held, more
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    print(f"empty={torch.cuda.mem_get_info()[0]}")


main()
