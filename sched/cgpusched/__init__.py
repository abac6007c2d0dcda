"""The scheduling state of cgpud: GPUs, instances, the six policies, and the gate that carries them out."""
