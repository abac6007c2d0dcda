"""The file tree at /run/cgpu: a declared table of nodes over cgpusched's state and commands, served through FUSE."""
