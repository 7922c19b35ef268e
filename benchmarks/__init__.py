"""Figures that the README quotes: `python -m benchmarks --help`."""
