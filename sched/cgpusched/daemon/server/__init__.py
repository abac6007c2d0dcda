"""The sockets of programs and of cgpuctl: who may speak, what is said."""
