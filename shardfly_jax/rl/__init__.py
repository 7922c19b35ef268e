"""A small RL loop that learns: GRPO on sums, trainer and rollouts on separate devices. See `examples/grpo.py`."""
