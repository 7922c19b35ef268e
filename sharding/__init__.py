"""Pure planning: from two shardings and a mapping to a plan. NumPy and the standard library; no device, no JAX.

`ml_dtypes` gives NumPy its bfloat16 and `einops` parses the patterns; nothing else is imported.
"""

from shardfly_jax.sharding.families import TargetTree as TargetTree
from shardfly_jax.sharding.layouts import Layout as Layout, LocalTensors as LocalTensors
from shardfly_jax.sharding.mapping import Mapping as Mapping
from shardfly_jax.sharding.plan import Plan as Plan, load as load
from shardfly_jax.sharding.planner import build_plan as build_plan
from shardfly_jax.sharding.problem import Problem as Problem
from shardfly_jax.sharding.topology import Topology as Topology, preset as preset

if __name__ == "sharding":
    raise ImportError("this folder is a part of shardfly_jax; import shardfly_jax.sharding")
