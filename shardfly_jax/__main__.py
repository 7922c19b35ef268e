"""The command line: `python -m shardfly_jax {demo,rl,explain,simulate,models}`."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import jax

from shardfly_jax import commands
from shardfly_jax.engines import vllm
from shardfly_jax.rl.options import MAX_NUMBER, MODES, Options
from shardfly_jax.sharding.errors import ShardflyError
from shardfly_jax.sharding.topology import PRESETS

PROGRAM = "python -m shardfly_jax"
EXAMPLE = "--model Qwen3-30B-A3B --trainer tunix:fsdp=16,tp=4 --rollout vllm:tp=8,replicas=4"
DEMO_DEVICES = 8
DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


class _Parser(argparse.ArgumentParser):
    """Errors are exceptions, not an exit: `main` prints them on one line."""

    def error(self, message: str) -> NoReturn:
        raise commands.UsageError(f"{message}. See {self.prog} --help.")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      arguments: Without the program's name; those of the process when None.

    Returns:
      The exit status: 0, or 2 after a line on stderr that says what is wrong with the arguments.
    """
    try:
        chosen = _parser().parse_args(arguments)
        if chosen.command == "demo":
            return _demo(chosen)
        if chosen.command == "rl":
            return _rl(chosen)
        text = _text(chosen)
    except (commands.UsageError, ShardflyError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:  # the reader, e.g. head, has seen enough; what is left must not be flushed at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _text(chosen: argparse.Namespace) -> str:
    if chosen.command == "models":
        return commands.models()
    route = commands.Route(
        model=chosen.model, trainer=chosen.trainer, rollout=chosen.rollout, trainer_dtype=chosen.trainer_dtype,
        hosts=chosen.hosts,
    )  # fmt: skip
    if chosen.command == "explain":
        return commands.explain(route, chosen.topology, chosen.save, chosen.plot)
    return commands.simulate(route, (chosen.topology,) if chosen.topology else tuple(reversed(PRESETS)))


def _demo(chosen: argparse.Namespace) -> int:
    choose_devices()
    from shardfly_jax import demo

    return demo.run(chosen.model, chosen.updates, chosen.format)


def _rl(chosen: argparse.Namespace) -> int:
    choose_devices()
    try:
        from shardfly_jax.rl import command
    except ImportError as error:  # optax or matplotlib
        raise commands.UsageError(str(error)) from error
    names = [field.name for field in dataclasses.fields(Options)]
    return command.run(Options(**{name: getattr(chosen, name) for name in names}), chosen.plot)


def choose_devices() -> None:
    """Eight CPU devices unless the environment says otherwise.

    JAX came with the package and has read `JAX_PLATFORMS`; but no backend was started yet, so that its settings and
    `XLA_FLAGS` still count.
    """
    if "JAX_PLATFORMS" not in os.environ:
        os.environ["JAX_PLATFORMS"] = "cpu"
        jax.config.update("jax_platforms", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    if DEVICE_COUNT_FLAG not in flags and "JAX_NUM_CPU_DEVICES" not in os.environ:
        os.environ["XLA_FLAGS"] = f"{flags} {DEVICE_COUNT_FLAG}={DEMO_DEVICES}".strip()


def _parser() -> _Parser:
    parser = _Parser(prog=PROGRAM, description="Streams the weights of a JAX trainer into its rollout engines.")
    add = parser.add_subparsers(dest="command", required=True, metavar="{demo,rl,explain,simulate,models}").add_parser
    demo = add("demo", help="real updates on 8 CPU devices, every byte checked")
    demo.add_argument("--model", default="Qwen3-0.6B", help="a name that `models` lists (default: %(default)s)")
    demo.add_argument("--updates", type=_count, default=3, help="how many (default: %(default)s)")
    demo.add_argument("--format", choices=vllm.QUANTIZATIONS, help="quantize on the way (default: bfloat16)")
    _add_rl(add("rl", help="GRPO on sums: a policy learns to add, its rollouts synced after every step"))
    explain = add(
        "explain",
        help="a plan's report: who sends what to whom, and how long it would take",
        epilog=f"example: {PROGRAM} explain {EXAMPLE}",
    )
    _add_route(explain)
    explain.add_argument("--topology", choices=PRESETS, default="h100", help="GPU (default: %(default)s)")
    explain.add_argument("--save", type=Path, metavar="PATH", help="write the plan there; sf.load_plan reads it")
    explain.add_argument("--plot", type=Path, metavar="PATH.png", help="draw the plan there; needs matplotlib")
    simulate = add(
        "simulate",
        help="predicted time of an update, its bound and their ratio",
        epilog=f"example: {PROGRAM} simulate {EXAMPLE}",
    )
    _add_route(simulate)
    simulate.add_argument("--topology", choices=PRESETS, help="GPU (default: each in turn)")
    add("models", help="the known models, and the engines that have a mapping for them")
    return parser


def _add_rl(parser: argparse.ArgumentParser) -> None:
    """Every field of `Options`, and the picture."""
    modes = "; ".join(f"{mode}: {meaning}" for mode, meaning in MODES.items())
    helps = {
        "steps": (_count, "train steps"),
        "prompts": (_count, "of a batch; prompts x completions are even, for the two replicas"),
        "completions": (_count, "answers to each prompt: GRPO's group"),
        "largest": (_whole(1, MAX_NUMBER), f"the numbers to add are 0 to this, at most {MAX_NUMBER}"),
        "learning_rate": (_rate, "Adam's"),
        "seed": (_whole(0, (1 << 32) - 1), "of weights, prompts and draws"),
    }
    default = Options()
    parser.add_argument("--mode", choices=MODES, default=default.mode, help=f"{modes} (default: %(default)s)")
    for name, (kind, text) in helps.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, default=getattr(default, name), help=f"{text} (default: %(default)s)")
    parser.add_argument(
        "--plot", type=_png, metavar="PATH.png", default=Path("out/grpo.png"),
        help="the rewards are drawn there (default: %(default)s)",
    )  # fmt: skip


def _add_route(parser: argparse.ArgumentParser) -> None:
    trainers = " | ".join(f"{name}:{_options(engine)}" for name, engine in commands.TRAINERS.items())
    rollouts = " | ".join(f"{name}:{_options(engine)}" for name, engine in commands.ROLLOUTS.items())
    parser.add_argument("--model", required=True, help="a name that `models` lists")
    parser.add_argument("--trainer", required=True, metavar="ENGINE:OPTIONS", help=f"{trainers} (defaults shown)")
    choices = "; ".join(
        f"{option} of {name}: {' | '.join(words)}"
        for name, engine in commands.ROLLOUTS.items()
        for option, words in engine.choices.items()
    )
    parser.add_argument(
        "--rollout",
        required=True,
        metavar="ENGINE:OPTIONS",
        help=f"{rollouts} (defaults shown; ep: expert_parallel). {choices}",
    )
    parser.add_argument(
        "--trainer-dtype", choices=commands.TRAINER_DTYPES, default=commands.ROLLOUT_DTYPE,
        help="cast to the rollout's bfloat16 if another (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--hosts", type=_count, metavar="N", help="hosts of 8 GPUs (default: as many as needed)")


def _options(engine: commands.Engine) -> str:
    return ",".join(f"{name}={default}" for name, default in engine.options.items())


def _whole(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        value = commands.parse_count(text, low, high)
        if value is None:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low} to {high}")
        return value

    return parse


_count = _whole(1, commands.MAX_RANKS)


def _png(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".png":
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .png, but a PNG is written")
    return path


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


if __name__ == "__main__":
    sys.exit(main())
