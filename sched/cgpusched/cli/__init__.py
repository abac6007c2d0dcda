"""The commands: cgpuctl and cgpu-smi. They talk to cgpud over its control socket and import no daemon code."""
