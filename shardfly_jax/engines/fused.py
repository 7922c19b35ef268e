"""Parameters as vLLM and SGLang fuse and cut them, in the order in which their loaders fill them.

Parameters are described as global arrays: a fused parameter [q_r; k_r; v_r] of rank r is the r-th part of its array.
Facts that both engines share stand here; names and options of one engine in its own module.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from collections.abc import Callable, Iterator, Mapping as AbstractMapping, Sequence
from numbers import Integral
from typing import Any

from shardfly_jax.engines.canonical import LAYER
from shardfly_jax.engines.models import Model
from shardfly_jax.engines.side import AnyMesh, SideBuilder
from shardfly_jax.sharding.errors import PlanError
from shardfly_jax.sharding.language import Expr, alias, concat, fuse, src

VOCAB_MULTIPLE = 64
"""Both pad the vocabulary to a multiple of this (`DEFAULT_VOCAB_PADDING_SIZE` of `vocab_parallel_embedding.py`)."""

Placement = Sequence[int] | AbstractMapping[int, Sequence[int]]
"""The expert in each slot, slots in rank order; or that per layer. Redundant experts stand in it more than once."""


def padded_vocab(m: Model) -> int:
    """Rows of the embedding."""
    return -(-m.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Mesh axes over which an engine cuts.

    Attributes:
      tp: Heads, widths of dense MLPs, the vocabulary.
      shared: The width of the expert that all tokens pass.
      experts: Experts; each rank holds whole ones.
      width: Widths of experts.
    """

    tp: tuple[str, ...]
    shared: tuple[str, ...]
    experts: tuple[str, ...] = ()
    width: tuple[str, ...] = ()


class FusedBuilder(SideBuilder):
    """Collects a rollout of one of these engines.

    Args:
      model: Its sizes.
      mesh: With all axes of `cuts`.
      cuts: The axes.
      dtype: Of parameters that give none of their own.
      placement: Of experts; None for rising order.

    Raises:
      PlanError: Sizes that the ranks do not divide, or a placement that leaves experts out; all are listed.
    """

    def __init__(self, model: Model, mesh: AnyMesh, cuts: Cuts, dtype: Any, placement: Placement | None):
        super().__init__(mesh, dtype, model)
        self.cuts, self.placement = cuts, placement
        faults = list(_faults(model, cuts, self.ways, placement))
        if faults:
            raise PlanError(faults)

    def ways(self, axes: tuple[str, ...]) -> int:
        """Into how many parts some mesh axes cut."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    def add(
        self, name: str, expr: Expr, shape: tuple[int, ...], *spec: Any, layers: range | None = None, dtype: Any = None
    ) -> None:
        """Adds a parameter, or one per layer, with what it is."""
        self.leaf(name, shape, *(cut or None for cut in spec), layers=layers, dtype=dtype)
        self.entries[name] = expr

    def same(
        self, name: str, shape: tuple[int, ...], *spec: Any, layers: range | None = None, dtype: Any = None
    ) -> None:
        """Adds a parameter that is the canonical tensor of its name."""
        self.add(name, src(name), shape, *spec, layers=layers, dtype=dtype)

    def outside_layers(self, embedding: str = "model.embed_tokens.weight") -> None:
        """Embedding, last norm and head. A tied head is the embedding's own parameter."""
        m, rows, tp = self.model, padded_vocab(self.model), self.cuts.tp

        def padded(name: str) -> Expr:
            return src(name).pad([(0, rows - m.vocab), (0, 0)]) if rows > m.vocab else src(name)

        self.add(embedding, padded("model.embed_tokens.weight"), (rows, m.hidden), tp)
        self.same("model.norm.weight", (m.hidden,))
        self.add("lm_head.weight", alias(embedding) if m.tied else padded("lm_head.weight"), (rows, m.hidden), tp)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self.same(f"{LAYER}{norm}.weight", (m.hidden,), layers=range(m.layers))

    def attention(self, own: str = "self_attn.", sinks_dtype: Any = None) -> None:
        """[q_r; k_r; v_r] on each rank; with more ranks than kv heads, neighbours share one."""
        m, tp, layers = self.model, self.cuts.tp, range(self.model.layers)
        kv_heads = max(m.kv_heads, self.ways(tp))

        def kv(name: str, *rest: str) -> Expr:
            whole = src(name)
            if kv_heads == m.kv_heads:
                return whole
            axes = " ".join(rest)
            heads = whole.rearrange(f"(k h) {axes} -> k h {axes}", h=m.head_dim)
            return heads.repeat(kv_heads // m.kv_heads, axis=0).rearrange(f"k h {axes} -> (k h) {axes}")

        p = LAYER + "self_attn."
        rows = (m.heads + 2 * kv_heads) * m.head_dim
        weight = fuse(src(p + "q_proj.weight"), kv(p + "k_proj.weight", "d"), kv(p + "v_proj.weight", "d"), axis=0)
        self.add(f"{LAYER}{own}qkv_proj.weight", weight, (rows, m.hidden), tp, layers=layers)
        if m.qkv_bias:
            bias = fuse(src(p + "q_proj.bias"), kv(p + "k_proj.bias"), kv(p + "v_proj.bias"), axis=0)
            self.add(f"{LAYER}{own}qkv_proj.bias", bias, (rows,), tp, layers=layers)
        out = src(p + "o_proj.weight")
        self.add(f"{LAYER}{own}o_proj.weight", out, (m.hidden, m.heads * m.head_dim), (), tp, layers=layers)
        if m.o_bias:  # whole on every rank; only the first adds it
            self.add(f"{LAYER}{own}o_proj.bias", src(p + "o_proj.bias"), (m.hidden,), layers=layers)
        if m.sinks:
            self.add(f"{LAYER}{own}sinks", src(p + "sinks"), (m.heads,), tp, layers=layers, dtype=sinks_dtype)
        for norm in ("q_norm", "k_norm") if m.qk_norm else ():
            self.add(f"{LAYER}{own}{norm}.weight", src(f"{p}{norm}.weight"), (m.head_dim,), layers=layers)

    def latent_attention(self, fused_name: str) -> None:
        """Compressions whole on every rank, queries' and keys' in one parameter; heads cut."""
        m, tp, layers = self.model, self.cuts.tp, range(self.model.layers)
        assert m.latent is not None
        mla, p = m.latent, LAYER + "self_attn."
        down = mla.kv_rank + mla.rope
        if mla.q_rank is None:
            self.same(p + "q_proj.weight", (m.heads * m.head_dim, m.hidden), tp, layers=layers)
            self.same(p + "kv_a_proj_with_mqa.weight", (down, m.hidden), layers=layers)
        else:
            both = concat([src(p + "q_a_proj.weight"), src(p + "kv_a_proj_with_mqa.weight")])
            self.add(f"{p}{fused_name}.weight", both, (mla.q_rank + down, m.hidden), layers=layers)
            self.same(p + "q_a_layernorm.weight", (mla.q_rank,), layers=layers)
            self.same(p + "q_b_proj.weight", (m.heads * m.head_dim, mla.q_rank), tp, layers=layers)
        self.same(p + "kv_a_layernorm.weight", (mla.kv_rank,), layers=layers)
        self.same(p + "kv_b_proj.weight", (m.heads * (mla.nope + mla.value), mla.kv_rank), tp, layers=layers)
        self.same(p + "o_proj.weight", (m.hidden, m.heads * mla.value), (), tp, layers=layers)

    def mlp(self) -> None:
        """Layers without experts: [gate_r; up_r] and the columns of down."""
        if self.model.dense_layers:
            self._mlp("mlp.", self.model.width, self.cuts.tp, self.model.dense_layers)

    def shared_expert(self) -> None:
        """The same for the expert that all tokens pass."""
        assert self.model.experts is not None
        if self.model.experts.shared_width:
            width = self.model.experts.shared_width
            self._mlp("mlp.shared_experts.", width, self.cuts.shared, self.model.sparse_layers)

    def _mlp(self, prefix: str, width: int, cut: tuple[str, ...], layers: range) -> None:
        p = LAYER + prefix
        both = fuse(src(p + "gate_proj.weight"), src(p + "up_proj.weight"), axis=0)
        self.add(p + "gate_up_proj.weight", both, (2 * width, self.model.hidden), cut, layers=layers)
        self.same(p + "down_proj.weight", (self.model.hidden, width), (), cut, layers=layers)

    def router(self, dtype: Any = None) -> None:
        """Whole on every rank, experts in their own order."""
        m, layers = self.model, self.model.sparse_layers
        assert m.experts is not None
        self.same(LAYER + "mlp.gate.weight", (m.experts.count, m.hidden), layers=layers, dtype=dtype)
        if m.experts.correction:
            bias = LAYER + "mlp.gate.e_score_correction_bias"
            self.same(bias, (m.experts.count,), layers=layers, dtype="float32")

    def experts(self, *, up_first: bool = False, into_first: bool = False, shared: bool = False) -> None:
        """w13 [slots, 2 * width, hidden] with [gate_r; up_r] per expert, and w2 [slots, hidden, width].

        Args:
          up_first: [up_r; gate_r].
          into_first: Both transposed: [slots, in, out].
          shared: The expert of all tokens follows the others.
        """
        m, layers, x, w = self.model, self.model.sparse_layers, self.cuts.experts, self.cuts.width
        assert m.experts is not None
        f = m.experts.width

        def slots(name: str) -> Expr:
            routed = self.placed(src(f"{LAYER}mlp.experts.{name}.weight"))
            if shared:
                routed = concat([routed, src(f"{LAYER}mlp.shared_experts.{name}.weight").rearrange("o i -> 1 o i")])
            return routed.rearrange("e o i -> e i o") if into_first else routed

        gate, up, down = (slots(name) for name in ("gate_proj", "up_proj", "down_proj"))
        both = fuse(*((up, gate) if up_first else (gate, up)), axis=2 if into_first else 1)
        count = self.slots + shared
        p = LAYER + "mlp.experts."
        if into_first:
            self.add(p + "w13_weight", both, (count, m.hidden, 2 * f), x, (), w, layers=layers)
            self.add(p + "w2_weight", down, (count, f, m.hidden), x, w, (), layers=layers)
        else:
            self.add(p + "w13_weight", both, (count, 2 * f, m.hidden), x, w, (), layers=layers)
            self.add(p + "w2_weight", down, (count, m.hidden, f), x, (), w, layers=layers)

    def interleaved_experts(
        self, bias_names: tuple[str, str], bias_dtype: Any = None, into_first: bool = False
    ) -> None:
        """gpt-oss: rows of w13 alternate between gate and up, so that a rank's rows are one slice.

        Args:
          bias_names: Of the biases of w13 and w2.
          bias_dtype: Of them.
          into_first: Both weights as [slots, in, out].
        """
        m, layers, x, w = self.model, self.model.sparse_layers, self.cuts.experts, self.cuts.width
        assert m.experts is not None
        f, p = m.experts.width, LAYER + "mlp.experts."
        self.same(LAYER + "mlp.router.weight", (m.experts.count, m.hidden), layers=layers)
        self.same(LAYER + "mlp.router.bias", (m.experts.count,), layers=layers)
        w13, w2 = self.placed(src(p + "gate_up_proj")), self.placed(src(p + "down_proj"))
        if into_first:
            self.add(p + "w13_weight", w13, (self.slots, m.hidden, 2 * f), x, (), w, layers=layers)
            self.add(p + "w2_weight", w2, (self.slots, f, m.hidden), x, w, (), layers=layers)
        else:
            w13, w2 = (weight.rearrange("e i o -> e o i") for weight in (w13, w2))
            self.add(p + "w13_weight", w13, (self.slots, 2 * f, m.hidden), x, w, (), layers=layers)
            self.add(p + "w2_weight", w2, (self.slots, m.hidden, f), x, (), w, layers=layers)
        b13, b2 = (self.placed(src(p + name)) for name in ("gate_up_proj_bias", "down_proj_bias"))
        self.add(p + bias_names[0], b13, (self.slots, 2 * f), x, w, layers=layers, dtype=bias_dtype)
        more = self.ways(w) - 1  # ranks that share an expert add up their outputs: all but the first hold zeros
        zeros = b2.pad([(0, 0), (0, more * m.hidden)]) if more else b2
        self.add(p + bias_names[1], zeros, (self.slots, m.hidden * (1 + more)), x, w, layers=layers, dtype=bias_dtype)

    @property
    def slots(self) -> int:
        """Places for routed experts on all ranks together."""
        assert self.model.experts is not None
        return len(_rows(self.placement)[0]) if self.placement is not None else self.model.experts.count

    def placed(self, expr: Expr) -> Expr:
        """Experts in the order of their slots."""
        return expr if self.placement is None else expr.take(self.placement, axis=0)


def _rows(placement: Placement) -> list[Sequence[int]]:
    return list(placement.values()) if isinstance(placement, AbstractMapping) else [placement]


def _is_placement(placement: Any) -> bool:
    """Whether it is a list or array of numbers, or lists by layer; none of them empty."""

    def is_row(row: Any) -> bool:
        row = row.tolist() if hasattr(row, "tolist") else row
        if not isinstance(row, Sequence) or not row:
            return False
        return all(isinstance(expert, Integral) and not isinstance(expert, bool) for expert in row)

    rows = _rows(placement)
    return len(rows) > 0 and all(is_row(row) for row in rows)


def _faults(m: Model, cuts: Cuts, ways: Callable[[tuple[str, ...]], int], placement: Placement | None) -> Iterator[str]:
    if placement is not None and not _is_placement(placement):
        yield (
            f"placement: it is {reprlib.repr(placement)}, but the number of the expert in each slot is needed. Give a "
            "list of int, or a dict of them by layer."
        )
        return
    tp = ways(cuts.tp)
    parts = [("attention heads", m.heads, tp, "tp"), ("padded vocabulary", padded_vocab(m), tp, "tp")]
    if m.dense_layers:
        parts.append(("MLP width", m.width, tp, "tp"))
    if m.experts is not None:
        slots = len(_rows(placement)[0]) if placement is not None else m.experts.count
        parts.append(("experts", slots, ways(cuts.experts), "the number of ranks with whole experts"))
        parts.append(("expert width", m.experts.width, ways(cuts.width), "the number of ranks that share an expert"))
        if m.experts.shared_width:
            parts.append(("shared expert width", m.experts.shared_width, ways(cuts.shared), "tp"))
    for what, n, k, name in parts:
        if n % k:
            yield f"indivisible: {m.name} has {n} as {what}, but {name}={k} does not divide it. Choose another mesh."
    if m.latent is None and max(tp, m.kv_heads) % min(tp, m.kv_heads):
        yield (
            f"indivisible: {m.name} has {m.kv_heads} kv heads, but neither divides the other with tp={tp}. "
            "Choose another mesh."
        )
    if placement is None:
        return
    if m.experts is None:
        yield f"placement: {m.name} has no experts. Leave it out."
    elif any(set(row) != set(range(m.experts.count)) for row in _rows(placement)):
        yield f"placement: some of the {m.experts.count} experts of {m.name} have no slot. Give each at least one."
    if isinstance(placement, AbstractMapping) and set(placement) != set(m.sparse_layers):
        yield f"placement: the layers with experts of {m.name} are {m.sparse_layers}. Give a list for each."
