"""Every operation of the mapping language against small NumPy expectations written out by hand.

Each case is planned and replayed on poisoned buffers for many cuts of sources and targets; see `checks.check_meaning`.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from checks import check_meaning, fresh

import shardfly_jax as sf

BF16 = ml_dtypes.bfloat16


def family(rng: np.random.Generator, name: str, layers: range, *shape: int) -> dict[str, np.ndarray]:
    return {name.replace("{i}", str(i)): fresh(rng, *shape) for i in layers}


# Names and indices


def test_a_source_of_another_name_is_copied(rng: np.random.Generator) -> None:
    w = fresh(rng, 4, 6)
    check_meaning({"t": sf.src("w")}, {"w": w}, {"t": w})


def test_an_integer_index_drops_its_axis(rng: np.random.Generator) -> None:
    w = fresh(rng, 3, 4, 5)
    check_meaning({"t": sf.src("w")[2]}, {"w": w}, {"t": w[2]})
    check_meaning({"t": sf.src("w")[:, -1]}, {"w": w}, {"t": w[:, 3]})
    check_meaning({"t": sf.src("w")[0, :, 4]}, {"w": w}, {"t": w[0, :, 4]})


def test_a_scalar_is_copied(rng: np.random.Generator) -> None:
    w = fresh(rng, 3)
    check_meaning({"t": sf.src("w")[1]}, {"w": w}, {"t": w[1].reshape(())})


def test_slices_take_ranges_and_steps(rng: np.random.Generator) -> None:
    w = fresh(rng, 6, 7)
    check_meaning({"t": sf.src("w")[1:5, 3:]}, {"w": w}, {"t": w[1:5, 3:]})
    check_meaning({"t": sf.src("w")[::2, 1:7:3]}, {"w": w}, {"t": w[[0, 2, 4]][:, [1, 4]]})
    check_meaning({"t": sf.src("w")[-3:, :-5]}, {"w": w}, {"t": w[3:, :2]})


def test_negative_steps_reverse(rng: np.random.Generator) -> None:
    w = fresh(rng, 5, 4)
    check_meaning({"t": sf.src("w")[::-1]}, {"w": w}, {"t": w[[4, 3, 2, 1, 0]]})
    check_meaning({"t": sf.src("w")[4:0:-2, ::-3]}, {"w": w}, {"t": w[[4, 2]][:, [3, 0]]})


def test_the_layer_variable_indexes_a_stacked_source(rng: np.random.Generator) -> None:
    w = fresh(rng, 3, 4, 5)
    check_meaning({"t.{i}": sf.src("w")["{i}"]}, {"w": w}, {"t.0": w[0], "t.1": w[1], "t.2": w[2]})
    check_meaning({"t.{i}": sf.src("w")[:, "{i}"]}, {"w": w}, {f"t.{i}": w[:, i] for i in range(4)})
    check_meaning({"t.{i}": sf.src("w")[1, :, "{i}"]}, {"w": w}, {f"t.{i}": w[1, :, i] for i in range(5)})


def test_the_layer_index_may_be_offset_and_scaled(rng: np.random.Generator) -> None:
    w = fresh(rng, 4, 3)
    check_meaning({"t.{i}": sf.src("w")["{i}-3"]}, {"w": w}, {"t.3": w[0], "t.4": w[1], "t.5": w[2], "t.6": w[3]})
    check_meaning({"t.{i}": sf.src("w")["{i}+1"]}, {"w": w}, {"t.0": w[1], "t.1": w[2], "t.2": w[3]})
    check_meaning({"t.{i}": sf.src("w")["{2*i+1}"]}, {"w": w}, {"t.0": w[1], "t.1": w[3]})


def test_layers_of_the_target_may_be_every_other_number(rng: np.random.Generator) -> None:
    dense, moe = family(rng, "dense.{i}", range(3), 4, 2), family(rng, "moe.{i}", range(3), 4, 2)
    entries = {"t.{2*i}": sf.src("dense.{i}"), "t.{2*i+1}": sf.src("moe.{i}")}
    want = {f"t.{2 * i}": dense[f"dense.{i}"] for i in range(3)} | {f"t.{2 * i + 1}": moe[f"moe.{i}"] for i in range(3)}
    check_meaning(entries, dense | moe, want)


def test_ranges_split_layers_between_patterns(rng: np.random.Generator) -> None:
    dense, moe = family(rng, "dense.{i}", range(3), 4, 2), fresh(rng, 2, 4, 2)
    entries = {"t.{i:0:3}": sf.src("dense.{i}"), "t.{i:3:}": sf.src("moe")["{i}-3"]}
    want = {f"t.{i}": dense[f"dense.{i}"] for i in range(3)} | {"t.3": moe[0], "t.4": moe[1]}
    check_meaning(entries, dense | {"moe": moe}, want)


def test_a_literal_name_beats_a_pattern(rng: np.random.Generator) -> None:
    arrays = {"h.0": fresh(rng, 4, 2), "special": fresh(rng, 4, 2), "h.2": fresh(rng, 4, 2)}
    entries = {"t.{i}": sf.src("h.{i}"), "t.1": sf.src("special")}
    check_meaning(entries, arrays, {"t.0": arrays["h.0"], "t.1": arrays["special"], "t.2": arrays["h.2"]})


def test_a_second_variable_is_bound_on_both_sides(rng: np.random.Generator) -> None:
    stacked = {f"h.{i}.experts": fresh(rng, 3, 2, 4) for i in range(2)}
    want = {f"t.{i}.e.{e}": stacked[f"h.{i}.experts"][e] for i in range(2) for e in range(3)}
    check_meaning({"t.{i}.e.{e}": sf.src("h.{i}.experts")["{e}"]}, stacked, want)
    named = {f"h.{e}.{i}": fresh(rng, 2, 4) for i in range(2) for e in range(3)}
    want = {f"t.{i}.e.{e}": named[f"h.{e + 1}.{i}"] for i in range(2) for e in range(2)}
    used = {name: x for name, x in named.items() if not name.startswith("h.0")}
    check_meaning({"t.{i}.e.{e}": sf.src("h.{e+1}.{i}")}, used, want)


def test_a_composed_mapping_reads_through_its_inner_one(rng: np.random.Generator) -> None:
    w = fresh(rng, 2, 3, 4)
    inner = {"h.{i}.w": sf.src("w")["{i}"]}
    outer = {"t.{i}": sf.src("h.{i}.w").rearrange("a b -> b a")}
    check_meaning(sf.compose(outer, inner), {"w": w}, {"t.0": w[0].T, "t.1": w[1].T})


# Layout operations


def test_take_repeats_reorders_and_counts_from_the_end(rng: np.random.Generator) -> None:
    w = fresh(rng, 5, 3)
    rows = np.stack([w[3], w[0], w[0], w[4], w[4], w[2]])
    check_meaning({"t": sf.src("w").take([3, 0, 0, -1, 4, 2], axis=0)}, {"w": w}, {"t": rows})
    check_meaning({"t": sf.src("w").take([-1, 1], axis=-1)}, {"w": w}, {"t": np.stack([w[:, 2], w[:, 1]], 1)})


def test_take_may_differ_from_layer_to_layer(rng: np.random.Generator) -> None:
    w = fresh(rng, 3, 4, 2)
    maps = {0: [0, 1, 2, 3, 0], 1: [3, 2, 1, 0, -1], 2: [2, 2, 2, 0, 1]}
    want = {
        "t.0": np.stack([w[0, 0], w[0, 1], w[0, 2], w[0, 3], w[0, 0]]),
        "t.1": np.stack([w[1, 3], w[1, 2], w[1, 1], w[1, 0], w[1, 3]]),
        "t.2": np.stack([w[2, 2], w[2, 2], w[2, 2], w[2, 0], w[2, 1]]),
    }
    check_meaning({"t.{i}": sf.src("w")["{i}"].take(maps, axis=0)}, {"w": w}, want)


def test_rearrange_permutes_axes(rng: np.random.Generator) -> None:
    w = fresh(rng, 2, 3, 4)
    check_meaning({"t": sf.src("w").rearrange("a b c -> c a b")}, {"w": w}, {"t": np.transpose(w, (2, 0, 1))})


def test_rearrange_merges_and_splits_axes(rng: np.random.Generator) -> None:
    q = fresh(rng, 4, 3, 2)  # d n h
    rows = np.stack([q[:, n, h] for n in range(3) for h in range(2)])
    check_meaning({"t": sf.src("q").rearrange("d n h -> (n h) d")}, {"q": q}, {"t": rows})
    w = fresh(rng, 6, 4)
    heads = np.stack([w[0:2], w[2:4], w[4:6]])  # [n, h, d]
    want = np.stack([heads[:, 0], heads[:, 1]], axis=2)  # [n, d, h]
    check_meaning({"t": sf.src("w").rearrange("(n h) d -> n d h", h=2)}, {"w": w}, {"t": want})


def test_rearrange_inserts_and_drops_axes_of_length_one(rng: np.random.Generator) -> None:
    w = fresh(rng, 3, 1, 4)
    check_meaning({"t": sf.src("w").rearrange("a 1 b -> b a 1")}, {"w": w}, {"t": w[:, 0].T.reshape(4, 3, 1)})


def test_interleaving_and_its_undoing_are_rearrangements(rng: np.random.Generator) -> None:
    w = fresh(rng, 6, 4)  # [gate; up] by halves
    woven = np.stack([w[0], w[3], w[1], w[4], w[2], w[5]])
    check_meaning({"t": sf.src("w").rearrange("(two f) d -> (f two) d", two=2)}, {"w": w}, {"t": woven})
    check_meaning({"t": sf.src("w").rearrange("(f two) d -> (two f) d", two=2)}, {"w": woven}, {"t": w})


def test_rope_lanes_go_from_pairs_to_halves(rng: np.random.Generator) -> None:
    w = fresh(rng, 2 * 6, 3)  # two heads of six lanes, rotated in pairs (0 1)(2 3)(4 5)
    rows = [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    expr = sf.src("w").rearrange("(n half two) d -> (n two half) d", n=2, two=2)
    check_meaning({"t": expr}, {"w": w}, {"t": w[rows]})


def test_repeat_puts_copies_next_to_each_other(rng: np.random.Generator) -> None:
    w = fresh(rng, 3, 2)
    check_meaning({"t": sf.src("w").repeat(2, axis=0)}, {"w": w}, {"t": w[[0, 0, 1, 1, 2, 2]]})
    check_meaning({"t": sf.src("w").repeat(3, axis=-1)}, {"w": w}, {"t": w[:, [0, 0, 0, 1, 1, 1]]})


def test_pad_fills_around_and_slices_truncate(rng: np.random.Generator) -> None:
    w = fresh(rng, 3, 4)
    want = np.full((6, 5), -1.5, np.float32)
    want[1:4, 0:4] = w
    check_meaning({"t": sf.src("w").pad([(1, 2), (0, 1)], -1.5)}, {"w": w}, {"t": want})
    check_meaning({"t": sf.src("w").pad([(0, 3), (0, 0)])[:3]}, {"w": w}, {"t": w})


def test_conversions_apply_to_what_was_filled(rng: np.random.Generator) -> None:
    w = fresh(rng, 3, 2)
    want = np.concatenate([w * np.float32(2) + np.float32(1), np.full((2, 2), 15, np.float32)])
    check_meaning({"t": sf.src("w").pad([(0, 2), (0, 0)], 7).scale(2, 1)}, {"w": w}, {"t": want})


def test_concat_joins_whole_parts(rng: np.random.Generator) -> None:
    a, b = fresh(rng, 3, 4), fresh(rng, 2, 4)
    want = np.empty((5, 4), np.float32)
    want[:3], want[3:] = a, b
    check_meaning({"t": sf.concat([sf.src("a"), sf.src("b")])}, {"a": a, "b": b}, {"t": want})
    check_meaning({"t": sf.concat([sf.src("a"), sf.src("a")[:, 1:2]], axis=-1)}, {"a": a}, {"t": a[:, [0, 1, 2, 3, 1]]})


def test_stack_makes_a_new_axis(rng: np.random.Generator) -> None:
    arrays = {f"e.{k}": fresh(rng, 3, 4) for k in range(2)}
    want = np.empty((3, 2, 4), np.float32)
    want[:, 0], want[:, 1] = arrays["e.0"], arrays["e.1"]
    check_meaning({"t": sf.stack([sf.src("e.0"), sf.src("e.1")], axis=1)}, arrays, {"t": want})
    last = np.moveaxis(want, 1, 2)
    check_meaning({"t": sf.stack([sf.src("e.0"), sf.src("e.1")], axis=-1)}, arrays, {"t": last})


def test_half_swap_is_two_slices(rng: np.random.Generator) -> None:
    w13 = fresh(rng, 6, 4)
    w31 = np.empty_like(w13)
    w31[:3], w31[3:] = w13[3:], w13[:3]
    expr = sf.concat([sf.src("w")[3:], sf.src("w")[:3]])
    check_meaning({"t": expr}, {"w": w13}, {"t": w31})


@pytest.mark.parametrize("ranks", [1, 2])
def test_fuse_lays_the_cuts_of_each_rank_side_by_side(rng: np.random.Generator, ranks: int) -> None:
    q, k, v = fresh(rng, 8, 3), fresh(rng, 4, 3), fresh(rng, 4, 3)
    want = np.concatenate(
        [q, k, v] if ranks == 1 else [q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]]  # rank 0, then rank 1
    )
    entries = {"t": sf.fuse(sf.src("q"), sf.src("k"), sf.src("v"), axis=0)}
    check_meaning(entries, {"q": q, "k": k, "v": v}, {"t": want}, cuttings_of_target=[(0, ranks)])


def test_fuse_works_along_another_axis_and_under_a_cast(rng: np.random.Generator) -> None:
    gate, up = fresh(rng, 2, 6), fresh(rng, 2, 6)
    want = np.concatenate([gate[:, 0:2], up[:, 0:2], gate[:, 2:4], up[:, 2:4], gate[:, 4:6], up[:, 4:6]], 1)
    entries = {"t": sf.fuse(sf.src("g"), sf.src("u"), axis=-1).astype("bfloat16")}
    check_meaning(entries, {"g": gate, "u": up}, {"t": want.astype(BF16)}, cuttings_of_target=[(1, 3)])


# Conversions


def test_scale_multiplies_and_adds_in_float32_with_two_roundings(rng: np.random.Generator) -> None:
    w = fresh(rng, 4, 6)
    want = w * np.float32(0.1) + np.float32(-1)
    check_meaning({"t": sf.src("w").scale(0.1, -1)}, {"w": w}, {"t": want})
    narrow = w.astype(BF16)
    want = (narrow.astype(np.float32) * np.float32(0.1) + np.float32(-1)).astype(BF16)
    check_meaning({"t": sf.src("w").scale(0.1, -1)}, {"w": narrow}, {"t": want})


def test_divide_is_a_true_division(rng: np.random.Generator) -> None:
    w = fresh(rng, 16, 16)
    assert (w / np.float32(7) != w * (np.float32(1) / np.float32(7))).any(), "the data must tell the two apart"
    check_meaning({"t": sf.src("w").divide(7)}, {"w": w}, {"t": w / np.float32(7)})


def test_a_cast_rounds_to_nearest_even() -> None:
    source = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0xBF817FFF, 0x7F7FFFFF, 0x7F800000], np.uint32)
    rounded = np.array([0x3F80, 0x3F82, 0x3F81, 0xBF81, 0x7F80, 0x7F80], np.uint16)
    check_meaning({"t": sf.src("w").astype("bfloat16")}, {"w": source.view(np.float32)}, {"t": rounded.view(BF16)})


def test_a_cast_keeps_nan_quiet_with_its_sign() -> None:
    source = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFF800001, 0x7FFFFFFF], np.uint32)
    quiet = np.array([0x7FC0, 0xFFC0, 0x7FC0, 0xFFC0, 0x7FC0], np.uint16)
    check_meaning({"t": sf.src("w").astype("bfloat16")}, {"w": source.view(np.float32)}, {"t": quiet.view(BF16)})


def test_widening_needs_no_permission(rng: np.random.Generator) -> None:
    w = fresh(rng, 3, 4, dtype="bfloat16")
    check_meaning({"t": sf.src("w")}, {"w": w}, {"t": w.astype(np.float32)})


def test_bits_travel_unchanged_without_a_cast() -> None:
    """NaN payloads and negative zero included."""
    w = np.array([0x7F800001, 0xFFFFFFFF, 0x80000000, 0x00000001, 0x7FC12345], np.uint32).view(np.float32)
    check_meaning({"t": sf.src("w")[::-1]}, {"w": w}, {"t": w[[4, 3, 2, 1, 0]]})


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int32", "uint16", "float16", "float8_e4m3fn", "float64"])
def test_any_real_dtype_is_moved(rng: np.random.Generator, dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    w = (
        rng.integers(0, 2, (3, 4)).astype(bool)
        if dtype == "bool"
        else np.frombuffer(rng.bytes(12 * kind.itemsize), kind)
    )
    w = w.reshape(3, 4)
    check_meaning({"t": sf.src("w").rearrange("a b -> b a")}, {"w": w}, {"t": w.T})


# Aliases


def test_an_alias_has_the_value_of_its_target(rng: np.random.Generator) -> None:
    w = fresh(rng, 6, 4)
    entries = {"embed": sf.src("w").scale(2.0), "lm_head": sf.alias("embed")}
    check_meaning(entries, {"w": w}, {"embed": w * np.float32(2), "lm_head": w * np.float32(2)})


def test_an_alias_may_follow_the_layer(rng: np.random.Generator) -> None:
    w = fresh(rng, 2, 3, 4)
    entries = {"a.{i}": sf.src("w")["{i}"], "b.{i}": sf.alias("a.{i}")}
    check_meaning(entries, {"w": w}, {"a.0": w[0], "a.1": w[1], "b.0": w[0], "b.1": w[1]})
