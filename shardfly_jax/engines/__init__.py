"""Adapters: how trainers and rollout engines name, shape and cut the weights of known models."""

from shardfly_jax.engines import (
    flax as flax,
    hf as hf,
    jax as jax,
    jax_toolbox as jax_toolbox,
    maxtext as maxtext,
    sglang as sglang,
    tunix as tunix,
    vllm as vllm,
)
from shardfly_jax.engines.models import (
    Experts as Experts,
    Latent as Latent,
    Model as Model,
    model as model,
    names as names,
)
from shardfly_jax.engines.side import Side as Side, route as route
