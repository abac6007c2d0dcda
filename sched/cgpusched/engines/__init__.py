"""The container engines' own configuration: what makes them run containers through ``cgpu-runtime``.

``docker``, ``containerd``, ``podman`` and ``podman_hook`` are pure: the text of a configuration file in, the new text
out. ``setup`` reads and writes the files and tells the engine. ``cdi`` writes the specification that engines with CDI
read.
"""
