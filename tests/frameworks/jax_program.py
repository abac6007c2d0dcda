"""JAX finds the simulated device and is told the quota. Prints key=value lines that test_jax.py reads."""

import jax

device, *others = jax.devices("cuda")
print(f"others={len(others)}", f"kind={device.device_kind}", f"platform={device.platform}", sep="\n")
print(f"limit={device.memory_stats()['bytes_limit']}")
