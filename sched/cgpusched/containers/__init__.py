"""Containers without I/O: what their variables ask for, and what that makes of an OCI configuration."""
