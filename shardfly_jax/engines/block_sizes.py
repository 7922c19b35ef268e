"""Which sizes blocks of fp8 must divide, and what to choose where they do not.

The rule is the engines' own: `validate_fp8_block_shape` (`quantization/utils/fp8_utils.py`) and
`Fp8MoEMethod.create_weights` (`quantization/fp8.py`) of vLLM, `validate_block_quant_shapes` and the like of SGLang.
What a rank holds of rows or columns that are cut, and each part of a fused weight but the last of an uncut one, are
whole blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh

from shardfly_jax.engines.fused import FusedBuilder
from shardfly_jax.engines.models import Model
from shardfly_jax.engines.side import AnyMesh
from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.quantization import Fp8Block

Settings = Mapping[str, Any]
"""`tp` and options of an engine's `rollout`, by name."""


def indivisible(builder: FusedBuilder, format: Fp8Block, *, shared_apart: bool = True) -> list[str]:
    """What blocks do not divide of what a rank holds, a sentence each but for its stop and a remedy.

    Args:
      shared_apart: Whether the expert that all tokens pass, if there is one, is not one of the others.
    """
    tp = builder.ways(builder.cuts.tp)
    return [
        f"indivisible: {builder.model.name} has {n} {what} per rank with tp={tp}, but blocks of {format.rows} x "
        f"{format.columns} do not divide them"
        for what, n, block in _sizes(builder, format, shared_apart)
        if n % block
    ]


def _sizes(builder: FusedBuilder, format: Fp8Block, shared_apart: bool) -> Iterator[tuple[str, int, int]]:
    """(what a rank holds, how much, and the length of the blocks that must divide it)."""
    m, rows, columns = builder.model, format.rows, format.columns
    tp = builder.ways(builder.cuts.tp)
    if m.latent is None:
        yield "query rows of self_attn.qkv_proj.weight", m.heads * m.head_dim // tp, rows
        yield "key rows of self_attn.qkv_proj.weight", max(m.kv_heads, tp) * m.head_dim // tp, rows
        value = m.head_dim
    else:
        mla, value = m.latent, m.latent.value
        if mla.q_rank is not None:
            yield "rows of q_a_proj in self_attn.fused_qkv_a_proj", mla.q_rank, rows
        if tp > 1:
            queries = "q_proj" if mla.q_rank is None else "q_b_proj"
            yield f"rows of self_attn.{queries}.weight", m.heads * m.head_dim // tp, rows
            yield "rows of self_attn.kv_b_proj.weight", m.heads * (mla.nope + mla.value) // tp, rows
    if tp > 1:
        yield "columns of self_attn.o_proj.weight", m.heads * value // tp, columns
    mlps = [("mlp.", m.width, tp)] if m.dense_layers else []
    if m.experts is not None and m.experts.shared_width and shared_apart:
        mlps.append(("mlp.shared_experts.", m.experts.shared_width, builder.ways(builder.cuts.shared)))
    for prefix, width, cuts in mlps:
        yield f"gate rows of {prefix}gate_up_proj.weight", width // cuts, rows
        if cuts > 1:
            yield f"columns of {prefix}down_proj.weight", width // cuts, columns
    if m.experts is not None:
        width = m.experts.width // builder.ways(builder.cuts.width)
        yield "gate rows of mlp.experts.w13_weight", width, rows
        if tp > 1:  # also where experts are whole
            yield "columns of mlp.experts.w2_weight", width, columns


def refusal(
    model: Model,
    faults: Sequence[str],
    given: Settings,
    known: Mapping[str, Sequence[Any]],
    does: Callable[[Settings], bool],
    others: Sequence[str],
    last: Sequence[str],
) -> PlanError:
    """The error of sizes that blocks do not divide: each with every way out.

    Args:
      faults: From `indivisible`.
      given: What was asked for.
      known: Values that `does` may be asked about, by setting; given ones need not be among them.
      does: Whether the engine takes settings and blocks divide the sizes then.
      others: Ways out beside those of `known`, in words that follow "choose".
      last: The like, where `known` has none.
    """
    tps = [t for t in range(1, model.heads + 1) if model.heads % t == 0]  # the engines take no others
    if ways := offers(given, {"tp": tps, **known}, does):
        remedy = "Choose " + ", or ".join([*ways, *others])
    else:
        nothing = "No tp with any expert_parallel does" if "expert_parallel" in known else "No tp does"
        remedy = f"{nothing}: choose " + ", or ".join([*others, *last])
    return PlanError([f"{fault}. {remedy}." for fault in faults])


def offers(given: Settings, known: Mapping[str, Sequence[Any]], does: Callable[[Settings], bool]) -> list[str]:
    """Changes of settings that do, in words: another tp alone, or the same one with other options. Where no options
    help the same one, larger ones than another tp alone gives, with other options.

    Of the options, as few are changed as must be.

    Args:
      given: With a `tp`, for which `does` is false.
      known: Values to try, by setting.
    """
    by_tp = {tp: _least_changes({**given, "tp": tp}, known, does) for tp in known.get("tp", ())}
    alone = [tp for tp, changes in by_tp.items() if changes == [{}]]
    out = [_words({"tp": alone})] if alone else []
    same = _least_changes(given, known, does)
    if same:
        return [*out, *map(_words, _merged(same))]
    more = [{"tp": tp, **change} for tp, changes in by_tp.items() if tp > max(alone, default=0) for change in changes]
    return [*out, *map(_words, _merged(more))]


def _least_changes(
    given: Settings, known: Mapping[str, Sequence[Any]], does: Callable[[Settings], bool]
) -> list[dict[str, Any]]:
    """The changes of all settings but tp that do, of those with the fewest."""
    new = {option: [v for v in values if v != given[option]] for option, values in known.items() if option != "tp"}
    for count in range(len(new) + 1):
        changes = [
            dict(zip(chosen, values, strict=True))
            for chosen in itertools.combinations(new, count)
            for values in itertools.product(*(new[option] for option in chosen))
        ]
        if found := [change for change in changes if does({**given, **change})]:
            return found
    return []


def _merged(changes: Sequence[Settings]) -> list[dict[str, list[Any]]]:
    """Changes by the lists of their values, any of which goes with each of the others'."""
    out: list[dict[str, list[Any]]] = [{option: [value] for option, value in change.items()} for change in changes]
    for option in ("expert_parallel", "tp"):
        merged: list[dict[str, list[Any]]] = []
        for change in out:
            rest = {name: values for name, values in change.items() if name != option}
            like = [m for m in merged if option in m and option in change and {**m, option: []} == {**rest, option: []}]
            if like:
                like[0][option] += change[option]
            else:
                merged.append(dict(change))
        out = merged
    return out


def _words(change: Mapping[str, Sequence[Any]]) -> str:
    """`tp from [2, 4] with expert_parallel=True`."""
    return " with ".join(
        f"{option}={values[0]!r}" if len(values) == 1 else f"{option} from {list(values)}"
        for option, values in change.items()
    )


def with_tp(mesh: AnyMesh, tp: int) -> AbstractMesh:
    """A mesh like another, but for the length of its axis `tp`."""
    sizes = {**mesh.shape, "tp": tp}
    return AbstractMesh(tuple(sizes.values()), tuple(sizes))
