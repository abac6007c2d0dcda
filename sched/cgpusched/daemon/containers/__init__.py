"""The containers that cgpu-runtime registers: which they are, what they get, whose a process is."""
