"""What the command line offers: engines by name with their options, and the work of each command.

An engine joins by an entry in `TRAINERS` or `ROLLOUTS`.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jax.sharding import AbstractMesh
from rich.text import Text

from shardfly_jax import engines
from shardfly_jax.engines import hf, maxtext, sglang, tunix, vllm
from shardfly_jax.engines.models import Model
from shardfly_jax.engines.side import Side
from shardfly_jax.planning import Plan, make_plan
from shardfly_jax.report import rendered, table
from shardfly_jax.sharding.topology import Topology, preset
from shardfly_jax.wording import bytes_text, secs_text

MAX_RANKS = 4096
"""More ranks on one side are taken for a slip."""
GPUS_PER_HOST = 8
SHOWN_FAULTS = 8
ROLLOUT_DTYPE = "bfloat16"
NOT_QUANTIZED = "none"
TRAINER_DTYPES = ("bfloat16", "float16", "float32")


Options = Mapping[str, Any]
"""Of an engine: a number or a word by name."""


class UsageError(Exception):
    """Arguments that cannot be right; one line that says what is allowed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A trainer or rollout engine on the command line.

    Attributes:
      options: Name of each option and its default; but for those of `choices`, all are numbers.
      ranks: Options whose product is the number of ranks.
      switches: Options that are 0 or 1.
      choices: Options that are one of some words.
      families: Model families with a mapping.
      build: Makes the side of a model from the options and a dtype.
    """

    options: Options
    ranks: tuple[str, ...]
    families: tuple[str, ...]
    build: Callable[[Model, Options, str], Side]
    switches: tuple[str, ...] = ()
    choices: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


def _tunix(model: Model, options: Options, dtype: str) -> Side:
    mesh = AbstractMesh((options["fsdp"], options["tp"]), ("fsdp", "tp"))
    return tunix.trainer(model, mesh, dtype=dtype)


def _maxtext(model: Model, options: Options, dtype: str) -> Side:
    axes = ("fsdp", "expert", "tensor")
    mesh = AbstractMesh(tuple(options[axis] for axis in axes), axes)
    return maxtext.trainer(model, mesh, dtype=dtype, scan_layers=bool(options["scan"]))


def _vllm(model: Model, options: Options, dtype: str) -> Side:
    _need_experts("ep", options["ep"] == 1, model)
    _need_experts("dp", options["dp"] > 1, model)
    mesh = AbstractMesh((options["replicas"], options["dp"], options["tp"]), ("replica", "dp", "tp"))
    return vllm.rollout(
        model, mesh, dtype=dtype, expert_parallel=bool(options["ep"]), quantization=_quantization(options)
    )


def _sglang(model: Model, options: Options, dtype: str) -> Side:
    _need_experts("ep", options["ep"] > 1, model)
    mesh = AbstractMesh((options["replicas"], options["tp"]), ("replica", "tp"))
    return sglang.rollout(model, mesh, dtype=dtype, expert_parallel=options["ep"], quantization=_quantization(options))


def _hf(model: Model, options: Options, dtype: str) -> Side:
    mesh = AbstractMesh((options["replicas"],), ("replica",))
    return hf.rollout(model, mesh, dtype=dtype, quantization=_quantization(options))


def _quantization(options: Options) -> str | None:
    return None if options["quantization"] == NOT_QUANTIZED else options["quantization"]


def _need_experts(option: str, is_used: bool, model: Model) -> None:
    if is_used and model.experts is None:
        raise UsageError(
            f"--rollout: option {option} shares out experts, but {model.name} has no experts. Leave it out."
        )


TRAINERS: dict[str, Engine] = {
    "tunix": Engine(options={"fsdp": 1, "tp": 1}, ranks=("fsdp", "tp"), families=tunix.FAMILIES, build=_tunix),
    "maxtext": Engine(
        options={"fsdp": 1, "expert": 1, "tensor": 1, "scan": 1}, ranks=("fsdp", "expert", "tensor"),
        switches=("scan",), families=maxtext.FAMILIES, build=_maxtext,
    ),
}  # fmt: skip
ROLLOUTS: dict[str, Engine] = {
    "vllm": Engine(
        options={"tp": 1, "dp": 1, "replicas": 1, "ep": 0, "quantization": NOT_QUANTIZED},
        ranks=("tp", "dp", "replicas"), switches=("ep",),
        choices={"quantization": (NOT_QUANTIZED, *vllm.QUANTIZATIONS)}, families=vllm.FAMILIES, build=_vllm,
    ),
    "sglang": Engine(
        options={"tp": 1, "ep": 1, "replicas": 1, "quantization": NOT_QUANTIZED}, ranks=("tp", "replicas"),
        choices={"quantization": (NOT_QUANTIZED, *sglang.QUANTIZATIONS)}, families=sglang.FAMILIES, build=_sglang,
    ),
    "hf": Engine(
        options={"replicas": 1, "quantization": NOT_QUANTIZED}, ranks=("replicas",),
        choices={"quantization": (NOT_QUANTIZED, *hf.QUANTIZATIONS)}, families=hf.FAMILIES, build=_hf,
    ),
}  # fmt: skip


IN_PYTHON = """
* In Python only, with your own shardings: sf.engines.hf.trainer. So are sf.engines.flax.trainer and .rollout,
  which map your own modules to any of these models, and sf.engines.jax_toolbox.trainer, for the dense ones.
"""


def parse_engine(flag: str, text: str, known: Mapping[str, Engine]) -> tuple[str, dict[str, Any]]:
    """Reads `tunix:fsdp=16,tp=4`.

    Args:
      flag: For messages.
      text: What stands behind it.
      known: Engines by name.

    Returns:
      The engine's name, and all its options.

    Raises:
      UsageError: An unknown engine or option, an option given twice, a number that is none or out of range, or a word
        that is not among those of its option.
    """
    name, _, rest = text.partition(":")
    if name not in known:
        raise UsageError(f"{flag}: {name!r} is not a known engine, but one of these is needed: {', '.join(known)}.")
    engine = known[name]
    options, given = dict(engine.options), set[str]()
    for item in filter(None, rest.split(",")):
        key, _, value = (part.strip() for part in item.partition("="))
        if key not in options:
            raise UsageError(f"{flag}: {name} has no option {key!r}, but {', '.join(options)}.")
        if key in given:
            raise UsageError(f"{flag}: option {key} is given twice.")
        options[key] = _value(flag, key, value, engine)
        given.add(key)
    ranks = math.prod(options[key] for key in engine.ranks)
    if ranks > MAX_RANKS:
        raise UsageError(f"{flag}: {' x '.join(engine.ranks)} is {ranks} ranks, but at most {MAX_RANKS} are planned.")
    return name, options


def _value(flag: str, key: str, text: str, engine: Engine) -> int | str:
    """What stands behind `=`, or nothing."""
    if key in engine.choices:
        if text not in engine.choices[key]:
            raise UsageError(
                f"{flag}: option {key} is {text!r}, but it must be one of {', '.join(engine.choices[key])}."
            )
        return text
    low, high = (0, 1) if key in engine.switches else (1, MAX_RANKS)
    value = parse_count(text, low, high)
    if value is None:
        rule = "0 or 1" if key in engine.switches else f"a number from 1 to {MAX_RANKS}"
        raise UsageError(f"{flag}: option {key} is {text!r}, but it must be {rule}, e.g. {key}={max(low, 1)}.")
    return value


def parse_count(text: str, low: int, high: int) -> int | None:
    """A number in digits from `low` to `high`; None if it is none."""
    if not text.isascii() or not text.isdigit() or len(text) > len(str(high)):
        return None
    return int(text) if low <= int(text) <= high else None


def topology_of(gpu: str, hosts: int | None, ranks: int) -> Topology:
    """The preset, with as many hosts of 8 as the ranks need unless told.

    Raises:
      UsageError: Too few hosts.
      PlanError: An unknown GPU.
    """
    needed = -(-ranks // GPUS_PER_HOST)
    if hosts is not None and hosts < needed:
        raise UsageError(
            f"--hosts: {hosts} hosts of {GPUS_PER_HOST} GPUs cannot hold {ranks} ranks. Give {needed} or more."
        )
    return preset(gpu, needed if hosts is None else hosts, GPUS_PER_HOST)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A model from a trainer to rollouts, as the command line gives it."""

    model: str
    trainer: str
    rollout: str
    trainer_dtype: str = ROLLOUT_DTYPE
    hosts: int | None = None

    def plan(self, gpu: str) -> Plan:
        """Plans it for a topology. Needs no devices.

        Raises:
          UsageError: See `parse_engine` and `topology_of`.
          PlanError: An unknown model, one without a mapping, or sizes that do not divide.
        """
        trainer_name, trainer_options = parse_engine("--trainer", self.trainer, TRAINERS)
        rollout_name, rollout_options = parse_engine("--rollout", self.rollout, ROLLOUTS)
        model = engines.model(self.model)
        trainer = TRAINERS[trainer_name].build(model, trainer_options, self.trainer_dtype)
        rollout = ROLLOUTS[rollout_name].build(model, rollout_options, ROLLOUT_DTYPE)
        ranks = math.prod(trainer_options[key] for key in TRAINERS[trainer_name].ranks)
        ranks += math.prod(rollout_options[key] for key in ROLLOUTS[rollout_name].ranks)
        return make_plan(
            trainer.params,
            rollout.params,
            engines.route(trainer, rollout),
            allow_cast=("*",),  # some trainers keep norms in float32
            topology=topology_of(gpu, self.hosts, ranks),
        )


def explain(route: Route, gpu: str, save: Path | None, plot: Path | None) -> str:
    """The report; the plan and its picture are written where asked.

    Raises:
      UsageError: A picture without matplotlib or of an unknown kind.
      OSError: A file cannot be written.
      PlanError: See `Route.plan`.
    """
    plan = route.plan(gpu)
    text = f"{route.model}: {route.trainer} -> {route.rollout}\n\n"
    text += plan.explain(topology_of(gpu, route.hosts, plan.ranks)) + "\n" * bool(save or plot)
    if save is not None:
        plan.save(save)
        text += f"plan saved: {save}, {bytes_text(save.stat().st_size)}\n"
    if plot is not None:
        try:
            plan.plot().savefig(plot)
        except (ImportError, ValueError) as error:  # no matplotlib; a kind of file that it does not know
            raise UsageError(f"--plot: {error}") from error
        text += f"plan drawn: {plot}\n"
    return text


def simulate(route: Route, gpus: tuple[str, ...]) -> str:
    """Predicted time, bound and ratio on each topology.

    Raises:
      UsageError, PlanError: See `Route.plan`.
    """
    out = table("topology", "NVLink", "NIC", "payload", "time", "bound", "ratio", "busiest link")
    head = f"{route.model}: {route.trainer} -> {route.rollout}"
    for gpu in gpus:
        plan = route.plan(gpu)
        topology = topology_of(gpu, route.hosts, plan.ranks)
        result = plan.simulate(topology)
        out.add_row(
            topology.name, f"{bytes_text(topology.nvlink_rate)}/s",
            f"{bytes_text(topology.nic_rate)}/s" if topology.nic_rate else "-", bytes_text(plan.nbytes),
            secs_text(result.secs), secs_text(result.bound_secs), f"{result.ratio:.3f}", result.busiest,
        )  # fmt: skip
    return rendered(head, out)


def models() -> str:
    """All models of the file, and the engines that have a mapping for them."""
    file = importlib.resources.files("shardfly_jax.engines").joinpath("models.json")
    data = json.loads(file.read_text(encoding="utf-8"))
    trainers = {name: engine.families for name, engine in TRAINERS.items()} | {"hf*": hf.FAMILIES}
    rollouts = {name: engine.families for name, engine in ROLLOUTS.items()}
    out = table("model", "family", "trainers", "rollouts", "layers", "billion parameters", left=4)
    for name, entry in data.items():
        with_mapping = (
            ", ".join(engine for engine, families in known.items() if entry["family"] in families) or "-"
            for known in (trainers, rollouts)
        )
        out.add_row(name, entry["family"], *with_mapping, str(entry["num_layers"]), _parameters(entry))
    return rendered("Models, and the engines that have a mapping for them", out, Text(IN_PYTHON))


def _parameters(entry: Mapping[str, Any]) -> str:
    """Published total of a model; from the size of its files where no total was published."""
    published = {key: figure["value"] for key, figure in entry["published"].items()}
    count = published.get("total") or published.get("hub_params_with_mtp")
    if count is None and entry["ckpt_dtype"] == "bfloat16" and "hub_total_size_bytes" in published:
        count = published["hub_total_size_bytes"] / 2
    return f"{count / 1e9:.2f}" if count else "-"
