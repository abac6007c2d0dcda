"""What NVML says of the GPU's real use, held against the ledger."""
