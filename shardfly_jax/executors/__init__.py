"""Executors run a plan on registered buffers. Same bytes from all; which one runs is a matter of hardware."""
