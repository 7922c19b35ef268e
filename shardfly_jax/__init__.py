"""shardfly_jax streams the weights of a JAX trainer into the sharded buffers of its rollout engines."""

from shardfly_jax import engines as engines, formats as formats
from shardfly_jax.instep import receiving as receiving, send as send
from shardfly_jax.layout import local as local
from shardfly_jax.planning import Plan as Plan, load_plan as load_plan, make_plan as make_plan, replicas as replicas
from shardfly_jax.registry import register as register, why_not_persistent as why_not_persistent
from shardfly_jax.rescaling import Rescaled as Rescaled, rescale as rescale
from shardfly_jax.sharding.composition import compose as compose
from shardfly_jax.sharding.errors import (
    DigestMismatch as DigestMismatch,
    LanguageError as LanguageError,
    NotFinite as NotFinite,
    NotRegistered as NotRegistered,
    NoUpdate as NoUpdate,
    ParamsMismatch as ParamsMismatch,
    PlanError as PlanError,
    PlanFileError as PlanFileError,
    Poisoned as Poisoned,
    RankLost as RankLost,
    RegistrationError as RegistrationError,
    ShardflyError as ShardflyError,
    StaleBuffer as StaleBuffer,
    StillPending as StillPending,
    SyncTimeout as SyncTimeout,
    TransferError as TransferError,
    UnknownOutcome as UnknownOutcome,
    UpdateRefused as UpdateRefused,
    VerificationError as VerificationError,
    WorldError as WorldError,
    WorldLost as WorldLost,
)
from shardfly_jax.sharding.language import (
    Expr as Expr,
    alias as alias,
    concat as concat,
    fuse as fuse,
    scale_of as scale_of,
    src as src,
    stack as stack,
)
from shardfly_jax.sharding.layouts import Layout as Layout
from shardfly_jax.sharding.mapping import Mapping as Mapping
from shardfly_jax.sharding.moves import Move as Move
from shardfly_jax.sharding.simulate import Simulation as Simulation
from shardfly_jax.sharding.topology import Topology as Topology, preset as preset
from shardfly_jax.update import params as params, receive as receive, sync as sync, verify as verify
from shardfly_jax.worlds.connecting import connect as connect

__version__ = "0.1.0"
