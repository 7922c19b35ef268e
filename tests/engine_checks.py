"""One check for all engine adapters: load a checkpoint into a trainer, sync, compare with the engine's own loading."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from checkpoints import Arrays
from checks import updated
from jax.sharding import Mesh

import shardfly_jax as sf
from shardfly_jax.engines.side import Side
from shardfly_jax.layout import leaf_names


def mesh(shape: tuple[int, ...], axes: tuple[str, ...], first: int = 0) -> Mesh:
    """A mesh of consecutive CPU devices, which are there beside GPUs too."""
    count = int(np.prod(shape))
    return Mesh(np.array(jax.devices("cpu")[first : first + count]).reshape(shape), axes)


def named(tree: Any) -> dict[str, Any]:
    """Leaves by name."""
    names, leaves, _ = leaf_names(tree)
    return dict(zip(names, leaves, strict=True))


def placed(side: Side, arrays: Arrays) -> Any:
    """A trainer's tree with the values of `arrays`, on the side's shardings."""
    names, leaves, structure = leaf_names(side.params)
    assert set(names) == set(arrays)
    assert [leaf.shape for leaf in leaves] == [arrays[name].shape for name in names]
    put = [jax.device_put(arrays[name], leaf.sharding) for name, leaf in zip(names, leaves, strict=True)]
    return jax.tree_util.tree_unflatten(structure, put)


def check_route(
    trainer: Side, loaded: Arrays, rollout: Side, wanted: Callable[[int], Arrays], **options: Any
) -> dict[str, jax.Array]:
    """Syncs `loaded` from the trainer to the rollout, whose memory is poisoned before, and compares bits.

    Args:
      trainer: On devices, in the dtypes of `loaded`.
      loaded: Its params by name.
      rollout: On devices.
      wanted: What a rank of the rollout's mesh holds after the engine's own loading, by name.
      **options: Of `make_plan`.
    """
    plan = sf.make_plan(trainer.params, rollout.params, sf.engines.route(trainer, rollout), **options)
    params = placed(trainer, loaded)
    out = named(updated(params, sf.register(plan)))
    (ranks,) = {leaf.sharding.mesh.size for leaf in out.values()}
    for rank in range(ranks):
        want = wanted(rank)
        assert set(out) == set(want)
        for name, array in out.items():
            device = array.sharding.mesh.devices.flat[rank]
            (have,) = (np.asarray(s.data) for s in array.addressable_shards if s.device == device)
            assert have.shape == want[name].shape, name
            assert have.dtype == want[name].dtype, name
            assert have.tobytes() == want[name].tobytes(), (name, rank)
    return out
