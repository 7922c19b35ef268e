"""`make_plan`: from JAX objects to a plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping as AbstractMapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

from shardfly_jax import sharding
from shardfly_jax.layout import Tree, read_tree
from shardfly_jax.sharding.errors import DigestMismatch, NotRegistered, NoUpdate, PlanError
from shardfly_jax.sharding.families import TargetTree
from shardfly_jax.sharding.language import Expr
from shardfly_jax.sharding.layouts import Layout, LocalTensors
from shardfly_jax.sharding.mapping import Mapping
from shardfly_jax.sharding.problem import Problem
from shardfly_jax.sharding.simulate import Simulation, simulate
from shardfly_jax.sharding.topology import Topology, preset

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from shardfly_jax.rescaling import Rescaled
    from shardfly_jax.session import Session

TARGET = "rollout"
"""Name of the target tree when there is one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Arguments of `make_plan` besides the trees."""

    mapping: Any
    allow_cast: tuple[str, ...]
    keep: tuple[str, ...]
    unused: tuple[str, ...]
    topology: Topology | str | None


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Plan(sharding.Plan):
    """A plan as users hold it: the pure plan, the trees it was made from, and its session once registered.

    Attributes:
      source: The trainer's tree; None in a loaded plan.
      targets: The rollout trees by name; empty in a loaded plan.
      recipe: What else it was made from; None in a loaded plan.
      session: Buffers and versions; None until `register`.
    """

    source: Tree | None = None
    targets: AbstractMapping[str, Tree] = dataclasses.field(default_factory=dict)
    recipe: Recipe | None = None
    session: Session | None = None

    @property
    def version(self) -> AbstractMapping[str, int]:
        """Number of the last complete update of each replica; 0 before the first.

        Updates are numbered as they begin, and numbers are never used again: a failed one leaves a gap. They go on in
        another world where some process registers the plan that it had, and begin anew where none does. In a world, the
        versions of replicas that other processes hold are those that the rendezvous has said last: `sync` returns once
        all are known, but `receive` as soon as this process' replicas are complete, so that those of others may follow.

        Raises:
          NotRegistered: The plan has no buffers yet.
        """
        return self.registered().versions

    @property
    def staleness(self) -> AbstractMapping[str, int]:
        """How many updates each replica is behind: those begun since the one that it holds completely.

        That is the number of the newest update less the replica's version. An update counts from when it begins,
        whether or not it succeeds; one that a trainer waits with, for its own computations or for rollouts to take
        part, counts while it waits. In a world, what the rendezvous has said last counts, also between updates. Worlds
        of MPI and NVSHMEM have none: there a rollout does not see that an update waits, and calls `receive` in step.

        Raises:
          NotRegistered: The plan has no buffers yet.
        """
        session = self.registered()
        versions = session.versions  # first: what becomes complete in between must not count as behind
        newest = session.newest
        return MappingProxyType({name: max(0, newest - version) for name, version in versions.items()})

    def registered(self) -> Session:
        """The session.

        Raises:
          NotRegistered: There is none, it belongs to another plan, or `rescale` has replaced the plan.
        """
        if self.session is None:
            raise NotRegistered(
                f"plan {self.digest[:12]} is not registered. Call plan = sf.register(plan, rollout_params) first."
            )
        if self.session.digest != self.digest:
            raise DigestMismatch(
                f"plan {self.digest[:12]} carries the session of plan {self.session.digest[:12]}. Register it anew."
            )
        self.session.check_in_force()
        return self.session

    @property
    def rescaled(self) -> Rescaled | None:
        """What `rescale` kept of the plan before; None for a plan that `register` returned.

        Raises:
          NotRegistered: The plan has no buffers.
        """
        return self.registered().rescaled

    @property
    def sender(self) -> Any:
        """What `sf.send` needs inside a jitted step; a pytree on the trainer's mesh, of the update that is under way.

        Raises:
          NotRegistered: The plan has no buffers.
          NoUpdate: It is asked for outside of `with sf.receiving(plan)`.
        """
        sender = self.registered().sender
        if sender is None:
            raise NoUpdate("sender: no update is under way. Ask for plan.sender inside `with sf.receiving(plan):`.")
        return sender

    def simulate(self, topology: Topology | str | None = None) -> Simulation:
        """Predicts an update's time.

        Args:
          topology: On which; a name such as "h200" stands for as many hosts of 8 of these GPUs as needed. None for the
            one that the plan was made for, or "h100" if it was made for none or was loaded.
        """
        return simulate(self, self._topology(topology))

    def _topology(self, topology: Topology | str | None) -> Topology:
        if topology is None:
            topology = self.recipe.topology if self.recipe is not None else None
        return _hosts_of(topology or "h100", self.ranks)

    def explain(self, topology: Topology | str | None = None) -> str:
        """Who sends what to whom, bytes per link, staging, short runs and predicted time, as text.

        Args:
          topology: What the time is predicted for, as in `simulate`. None predicts nothing if the plan was made for no
            topology and all devices are CPUs: how fast those are is not known.
        """
        from shardfly_jax.report import explain

        is_known = topology is not None or (self.recipe is not None and self.recipe.topology is not None)
        if not is_known:
            devices = [d for tree in (self.source, *self.targets.values()) if tree is not None for d in tree.devices]
            if devices and all(device is not None and device.platform == "cpu" for device in devices):
                return explain(self, None)
        return explain(self, self._topology(topology), assumed=not is_known)

    def plot(self) -> Figure:
        """Traffic between ranks, bytes per rank and run lengths, as a matplotlib figure."""
        from shardfly_jax.plots import plot_plan

        return plot_plan(self)


def make_plan(
    source: Any,
    target: Any,
    mapping: Mapping | AbstractMapping[str, Mapping | None] | None = None,
    *,
    allow_cast: str | Iterable[str] = (),
    keep: str | Iterable[str] = (),
    unused: str | Iterable[str] = (),
    topology: Topology | str | None = None,
) -> Plan:
    """Plans how weights get from a trainer to its rollouts. Reads no data.

    Args:
      source: The trainer's tree: `jax.Array`s, `ShapeDtypeStruct`s with sharding, `sf.Layout`s; an `nnx.State` or
        `nnx.Module`; or `sf.local` of trees whose tensors are whole on each rank that holds them.
      target: The rollout's tree, likewise, or `sf.local` of rank-local trees; or `sf.replicas` of several trees, which
        may differ in mesh, dtype and layout. A plain dict of trees is taken as replicas when `mapping` is a dict of
        mappings with the same keys.
      mapping: For each target name its expression; None for same names and shapes. One for all replicas, or a dict.
      allow_cast: Targets that may be narrowed, e.g. `("*",)` or `("model.layers.{i}.*",)`.
      keep: Targets that are never touched.
      unused: Sources that no target needs.
      topology: Steers which trainer serves whom and the order of forwarding; a name such as "h100" stands for as many
        hosts of 8 GPUs as needed.

    Raises:
      PlanError: Lists every fault: unmapped, doubly mapped, missing, misshapen, narrowed, indivisible, unused, empty.
    """
    faults: list[str] = []
    trees, mappings = _target_trees(target, mapping)
    read: dict[str, Tree] = {}
    source_tree: Tree | None = None
    try:
        source_tree = read_tree(source, "source")
    except PlanError as error:
        faults += error.faults
    for name, tree in trees.items():
        try:
            read[name] = read_tree(tree, f"target {name!r}")
        except PlanError as error:
            faults += error.faults
    if faults or source_tree is None:
        raise PlanError(faults)
    problem = Problem(
        {name: _whole(name, layout) for name, layout in source_tree.tensors.items()},
        len(source_tree.devices),
        [_target_tree(name, tree, mappings[name]) for name, tree in read.items()],
        allow_cast=_patterns("allow_cast", allow_cast),
        keep=_patterns("keep", keep),
        unused=_patterns("unused", unused),
    )
    recipe = Recipe(
        mapping=mapping, allow_cast=problem.allow_cast, keep=problem.keep, unused=problem.unused, topology=topology
    )
    if topology is not None:
        topology = _hosts_of(topology, problem.source_ranks + problem.target_ranks)
    built = sharding.build_plan(problem, topology)
    fields = {f.name: getattr(built, f.name) for f in dataclasses.fields(built)}
    return Plan(**fields, source=source_tree, targets=read, recipe=recipe)


def _hosts_of(topology: Topology | str, ranks: int) -> Topology:
    """A topology, or as many hosts of 8 GPUs of a named kind as some ranks need.

    Raises:
      PlanError: It is neither.
    """
    if isinstance(topology, str):
        return preset(topology, hosts=-(-ranks // 8))
    if not isinstance(topology, Topology):
        raise PlanError(
            f"topology: {topology!r} is a {type(topology).__name__}. Give the name of a GPU, such as 'h200', or an "
            "sf.Topology."
        )
    return topology


def replanned(plan: Plan, target: Any) -> Plan:
    """A plan for another target, made as `plan` was.

    Raises:
      PlanError: `plan` was loaded from a file, which does not say how; or as `make_plan`.
    """
    recipe = plan.recipe
    if recipe is None or plan.source is None:
        raise PlanError(
            f"rescale: plan {plan.digest[:12]} was loaded, and does not know its mapping. Give the new plan instead "
            "of a target."
        )
    mapping = recipe.mapping
    if isinstance(mapping, AbstractMapping) and not isinstance(mapping, Mapping):
        names = target.trees if isinstance(target, Replicas) else target if isinstance(target, dict) else mapping
        mapping = {name: mapping[name] for name in names if name in mapping}
    return make_plan(
        plan.source, target, mapping,
        allow_cast=recipe.allow_cast, keep=recipe.keep, unused=recipe.unused, topology=recipe.topology,
    )  # fmt: skip


def _patterns(option: str, given: str | Iterable[str]) -> tuple[str, ...]:
    patterns = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (given,)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise PlanError(f"{option}: {given!r} is not made of name patterns. Give strings such as '*' or 'h.{{i}}.w'.")
    return patterns


@dataclasses.dataclass(frozen=True)
class Replicas:
    """Several target trees by name; see `replicas`."""

    trees: AbstractMapping[str, Any]


def replicas(trees: AbstractMapping[str, Any]) -> Replicas:
    """Marks a dict as several rollouts rather than one tree. They may differ in mesh, dtype and layout."""
    if not isinstance(trees, AbstractMapping) or not trees:
        raise PlanError("replicas: no dict of trees. Give one tree per replica, by name.")
    bad = [name for name in trees if not isinstance(name, str) or not name or "/" in name or name == TARGET]
    if bad:
        raise PlanError(f"replicas: the names {bad} are taken or unusable. Use other non-empty strings without '/'.")
    return Replicas(dict(trees))


def _target_trees(target: Any, mapping: Any) -> tuple[dict[str, Any], dict[str, Mapping | None]]:
    per_replica = isinstance(mapping, dict) and not isinstance(mapping, Mapping)
    if per_replica and any(isinstance(entry, Expr) for entry in mapping.values()):
        names = sorted(map(str, mapping))
        raise PlanError(f"mapping: {names} are entries of a plain dict. Write sf.Mapping({{...}}).")
    if isinstance(target, Replicas):
        trees = dict(target.trees)
    elif per_replica and isinstance(target, dict):
        trees = dict(target)
    else:
        trees = {TARGET: target}
    if not per_replica:
        if mapping is not None and not isinstance(mapping, Mapping):
            raise PlanError(
                f"mapping: {type(mapping).__name__} is neither an sf.Mapping, a dict of them per replica, nor None."
            )
        return trees, dict.fromkeys(trees, mapping)
    if set(mapping) != set(trees) or not all(m is None or isinstance(m, Mapping) for m in mapping.values()):
        raise PlanError(
            f"mapping: its keys {sorted(mapping)} do not name the targets {sorted(trees)}. A dict of mappings "
            "goes with a dict of "
            "replicas; a mapping for one tree is written sf.Mapping({...})."
        )
    return trees, dict(mapping)


def _target_tree(name: str, tree: Tree, mapping: Mapping | None) -> TargetTree:
    several = len(tree.replicas) > 1
    parts = {f"{name}/{k}": ranks for k, ranks in enumerate(tree.replicas)} if several else {}
    return TargetTree(name=name, tensors=tree.tensors, mapping=mapping, ranks=len(tree.devices), replicas=parts)


def _whole(name: str, layout: Layout | LocalTensors) -> Layout:
    if isinstance(layout, Layout):
        return layout
    shapes = set(layout.shapes.values())
    if len(shapes) != 1:
        raise PlanError(
            f"local: the shapes {sorted(shapes)} of source {name!r} differ between ranks, but each is whole. "
            "Give an sf.Layout with boxes."
        )
    return layout.whole(shapes.pop())


def load_plan(path: str | Path | BinaryIO, digest: str | None = None) -> Plan:
    """Reads a saved plan.

    Args:
      path: What `plan.save` wrote.
      digest: If given, the digest that the plan must have, or at least its first 12 digits.

    Raises:
      PlanFileError: The file is no plan or is damaged.
      DigestMismatch: It is another plan.
    """
    plan = sharding.load(path)
    if digest is not None and (len(digest) < 12 or not plan.digest.startswith(digest)):
        raise DigestMismatch(
            f"plan file: {path} holds plan {plan.digest[:12]}, but {digest[:12]} is wanted. Make both sides "
            "plan from the same inputs."
        )
    return Plan(**{f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)})
