"""The report and the picture of a plan: their figures are checked by arithmetic of our own."""

import builtins
import dataclasses
import math
import re
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import shardfly_jax as sf
from shardfly_jax import commands
from shardfly_jax.contiguity import RUN_CLASSES, runs
from shardfly_jax.plots import SLICES, TIMELINE_HEIGHT, TIMELINE_RANKS, flows_by_slice, plot_timeline
from shardfly_jax.report import sharing_sets
from shardfly_jax.sharding.language import Expr
from shardfly_jax.wording import bytes_text, in_words, ranks_text, secs_text

H100 = sf.preset("h100")
WHOLE = [(0, 8), (0, 4)]


def qwen(
    model: str = "Qwen3-0.6B",
    trainer: str = "tunix:fsdp=2,tp=2",
    rollout: str = "vllm:tp=2,replicas=2",
    dtype: str = "bfloat16",
) -> sf.Plan:
    return commands.Route(model=model, trainer=trainer, rollout=rollout, trainer_dtype=dtype).plan("h100")


def tiny() -> sf.Plan:
    """128 bytes, half on each of two trainers, to two replicas of one rank; a bias is kept, a moment is unused."""
    halves = sf.Layout((8, 4), "float32", {0: [(0, 4), (0, 4)], 1: [(4, 8), (0, 4)]})
    source = {"w": halves, "moment": halves}
    replica = {"v": sf.Layout((8, 4), "float32", {0: WHOLE}), "bias": sf.Layout((8,), "float32", {0: [(0, 8)]})}
    mapping = sf.Mapping({"v": sf.src("w").scale(2.0)})
    target = sf.replicas({"left": replica, "right": replica})
    return sf.make_plan(source, target, mapping, keep=("bias",), unused=("moment",))


def one_rank(shape: tuple[int, ...], expr: Expr, target: tuple[int, ...], dtype: str = "float32") -> sf.Plan:
    """A float32 source `m`, whole on one trainer, to one rollout rank."""
    layouts = [sf.Layout(s, d, {0: [(0, n) for n in s]}) for s, d in ((shape, "float32"), (target, dtype))]
    return sf.make_plan({"m": layouts[0]}, {"t": layouts[1]}, sf.Mapping({"t": expr}), allow_cast=("*",))


def words_of(text: str, start: str) -> list[str]:
    """What follows `start` on the only line that begins with it."""
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return line.removeprefix(start).split()


def test_a_small_plan_is_reported_to_the_byte() -> None:
    plan = tiny()
    text = plan.explain(H100)
    assert text.startswith(f"Plan {plan.digest[:12]}: 2 trainer -> 2 rollout ranks, left, right\n")
    assert "256 B: 128 B from trainers, 128 B forwarded\n" in text
    assert "128 B; one broadcast of everything to every replica costs 256 B (2x)" in text
    assert "kept            2 targets: bias; never touched" in text
    assert "unused          1 sources: moment" in text
    root, other = (2, 3) if plan.first_hop_nbytes[0] else (3, 2)
    assert words_of(text, "trainer 0")[-1] == words_of(text, "trainer 1")[-1] == "64"
    assert words_of(text, f"rollout {root}")[-1] == "128"
    assert f"rollout {other}  " not in text
    assert words_of(text, "sum  ") == ["128", "128", "256"]
    first_hop = words_of(text, "rollouts receive from trainers (first hop)")
    assert " ".join(first_hop) == "0 B 64 B 128 B 2.000 128 B"
    assert words_of(text, "float32 -> *2")[:3] == ["128", "B", "50.0%"]
    assert words_of(text, "bits(float32)")[:3] == ["128", "B", "50.0%"]
    assert sharing_sets(plan) == {(2, 3): [0]}
    assert words_of(text, "2  ") == ["1", "1", "128", "B", "128", "B", "1"]


def test_the_sums_of_every_table_are_the_plans_own() -> None:
    plan = qwen(rollout="vllm:tp=2,replicas=4", dtype="float32")  # two of them in the trainers' host
    text = plan.explain()
    sums = [line.split() for line in text.splitlines() if line.startswith("all  ")]
    written, payload = bytes_text(plan.target_nbytes).split(), bytes_text(plan.nbytes).split()
    assert sums[0] == ["all", *written, *payload, f"{len(plan.moves):,}"]
    forwarded = bytes_text(plan.nbytes - plan.egress_nbytes).split()
    assert sums[1][3:7] == [*bytes_text(plan.egress_nbytes).split(), *forwarded]
    found = runs(plan)
    assert found.alike.sum() + found.reordered.sum() == plan.target_nbytes
    assert words_of(text, "sum  ")[-1] == bytes_text(plan.nbytes, short=True)
    ours = 2 * (28 * (6144 + 4096 + 3072 + 2048) * 1024 + 28 * (2 * 1024 + 2 * 128) + 151936 * 1024 + 1024)
    assert plan.distinct_nbytes == ours == 1_192_099_840
    assert plan.egress_nbytes == 2 * ours, "to one rank of each host"
    said = (
        "2.38 GB, as trainers send to several replicas themselves; one broadcast of everything to every replica costs"
    )
    assert f"{said} 4.77 GB (2x)" in " ".join(text.split())


def test_prediction_and_busiest_link_are_those_of_the_simulation() -> None:
    plan = qwen("Qwen3-8B")
    result = plan.simulate(H100)
    line = " ".join(words_of(plan.explain(H100), "predicted"))
    assert line == (
        f"{secs_text(result.secs)}; bound {secs_text(result.bound_secs)}, ratio {result.ratio:.3f}; "
        f"busiest link: {result.busiest}"
    )


def test_no_time_is_predicted_for_cpu_devices_unless_asked_for() -> None:
    over = NamedSharding(Mesh(np.array(jax.devices()[:2]), "x"), P("x"))
    array = jax.ShapeDtypeStruct((8, 4), "float32", sharding=over)
    plan = sf.make_plan({"w": array}, {"w": array})
    line = " ".join(words_of(plan.explain(), "predicted"))
    assert line == 'no time: all devices are CPUs. plan.explain("h100") says what H100s would take'
    assert "NVLink" not in plan.explain()
    assert "NVLink" in plan.explain("h100")


def test_no_ratio_is_shown_where_launches_take_longer_than_the_bound() -> None:
    result = tiny().simulate(H100)
    assert result.bound_secs < result.launch_secs
    line = " ".join(words_of(tiny().explain(H100), "predicted"))
    secs, launches, bound = map(secs_text, (result.secs, result.launch_secs, result.bound_secs))
    assert line.startswith(f"{secs}, {launches} of it launches; bound {bound}; busiest link")
    assert "ratio" not in line


def test_a_plan_is_shown_in_bytes_as_its_report_does() -> None:
    assert repr(tiny()).endswith("2 trainer ranks -> 2 rollout ranks, 256 B payload>")
    assert repr(qwen()).endswith(f", {bytes_text(qwen().nbytes)} payload>")


def test_many_ranks_are_shown_as_the_fullest_links() -> None:
    plan = qwen("Qwen3-0.6B", "tunix:fsdp=8,tp=2", "vllm:tp=2,replicas=4")
    traffic = plan.traffic()
    np.fill_diagonal(traffic, 0)
    text = plan.explain(sf.preset("h100", hosts=3))
    assert f"the fullest of {np.count_nonzero(traffic):,} pairs" in text
    assert sum(line.startswith(("trainer to rollout  ", "forwarded  ")) for line in text.splitlines()) == 10
    assert bytes_text(traffic.max()) in text
    crossing = traffic.sum() - sum(traffic[k : k + 8, k : k + 8].sum() for k in (0, 8, 16))
    assert " ".join(words_of(text, "between hosts")).startswith(f"{bytes_text(crossing)}, ")


def test_the_text_has_no_codes_and_fits_its_width_whatever_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "40", "TERM": "xterm-256color"}.items():
        monkeypatch.setenv(name, value)
    for plan in (qwen(), qwen("Qwen3-0.6B", "tunix:fsdp=8,tp=2", "vllm:tp=2,replicas=4")):
        text = plan.explain()
        assert "\x1b" not in text
        assert max(map(len, text.splitlines())) <= 110
        assert "model.layers.{i}.post_attention_layernorm.weight  " in text


def test_a_loaded_plan_explains_itself(tmp_path: Path) -> None:
    tiny().save(tmp_path / "plan")
    loaded = sf.load_plan(tmp_path / "plan")
    assert "kept            bias; never touched" in loaded.explain()


def test_an_expression_is_told_in_words() -> None:
    parts = [sf.src("q").rearrange("d n h -> (n h) d"), sf.src("k").repeat(2, axis=1).rearrange("d k h -> (k h) d")]
    assert in_words(sf.fuse(*parts, axis=0)) == "fuse of 2: transpose, repeat x2"
    assert in_words(sf.src("a").rearrange("(n h) d -> n h d", h=4).scale(0.5, add=-1)) == "reshape, scale 0.5-1"
    assert in_words(sf.src("a")) == "copy"


@pytest.mark.parametrize(
    ("plan", "label", "column", "element"),
    [
        (lambda: one_rank((16,), sf.src("m"), (16,)), "64 - 255 B", "alike", 0),
        (lambda: one_rank((9,), sf.src("m")[1:9], (8,)), "16 - 63 B", "alike", 32),  # starts 4 bytes in
        (lambda: one_rank((4, 6), sf.src("m")[:, :4], (4, 4)), "16 - 63 B", "alike", 64),  # rows 24 bytes apart
        (lambda: one_rank((8,), sf.src("m"), (8,), "bfloat16"), "16 - 63 B", "alike", 0),  # 32 read, 16 written
        (lambda: one_rank((8, 4), sf.src("m").rearrange("a b -> b a"), (4, 8)), "16 - 63 B", "reordered", 0),
        (lambda: one_rank((3, 5), sf.src("m").rearrange("a b -> b a"), (5, 3)), "< 16 B", "reordered", 60),
        (lambda: one_rank((64, 64), sf.src("m").rearrange("a b -> b a"), (64, 64)), "256 - 4095 B", "reordered", 0),
        (lambda: one_rank((1024,), sf.src("m"), (1024,)), ">= 4096 B", "alike", 0),
        (lambda: one_rank((8, 4), sf.src("m").repeat(2, axis=1), (8, 8)), "< 16 B", "reordered", 256),
    ],
)
def test_runs_and_the_element_path_are_counted(plan, label: str, column: str, element: int) -> None:
    made = plan()
    found = runs(made)
    assert getattr(found, column)[RUN_CLASSES.index(label)] == made.target_nbytes
    assert found.element.sum() == element


def test_figures_keep_three_digits_and_their_unit() -> None:
    assert [bytes_text(n) for n in (0, 999, 1000, 999_499, 999_500, 1_192_099_840)] == [
        "0 B", "999 B", "1 kB", "999 kB", "1 MB", "1.19 GB",
    ]  # fmt: skip
    assert [secs_text(t) for t in (2.5e-6, 1.5e-3, 0.9999, 12.0)] == ["2.5 us", "1.5 ms", "1 s", "12 s"]
    assert ranks_text([5, 4, 8, 6]) == "4-6, 8"


@pytest.mark.parametrize("rollout", ["vllm:tp=2,replicas=2", "vllm:tp=4,replicas=8"])
def test_the_picture_shows_all_traffic_all_ranks_and_all_runs(rollout: str) -> None:
    plan = qwen(rollout=rollout)
    figure = plan.plot()
    heat, bars, lengths, *_ = figure.axes
    traffic = plan.traffic()
    np.fill_diagonal(traffic, 0)
    np.testing.assert_array_equal(heat.images[0].get_array().filled(0), traffic)
    heights = [bar.get_height() for group in bars.containers for bar in group]
    assert math.fsum(h for h in heights if h > 0) == math.fsum(-h for h in heights if h < 0) == plan.nbytes
    assert sum(bar.get_width() for group in lengths.containers for bar in group) == plan.target_nbytes
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert figure.canvas.manager is None  # no window, no pyplot


@pytest.mark.parametrize("rollout", ["vllm:tp=2,replicas=2", "vllm:tp=1,replicas=4"])
def test_the_timeline_shows_all_traffic_once_and_forwards_after_what_they_forward(rollout: str) -> None:
    plan = qwen(rollout=rollout)
    traffic = plan.traffic()
    np.fill_diagonal(traffic, 0)
    direct, forwarded, sent = flows_by_slice(plan, 0.0, 1.0)
    np.testing.assert_allclose(sent.sum(axis=1), traffic.sum(axis=1))
    np.testing.assert_allclose(direct.sum(axis=1), traffic[: plan.source_ranks].sum(axis=0))
    np.testing.assert_allclose(forwarded.sum(axis=1), traffic[plan.source_ranks :].sum(axis=0))
    np.testing.assert_allclose((direct + forwarded).sum(axis=0), sent.sum(axis=0))
    passed_on, arrived = (
        sent[plan.source_ranks :].cumsum(axis=1),
        (direct + forwarded)[plan.source_ranks :].cumsum(axis=1),
    )
    hops = len(plan.replicas) - 1
    assert (passed_on <= hops * arrived * (1 + 1e-9)).all()  # a root may pass all that it has to each other replica
    halves = [np.stack(flows_by_slice(plan, first, last)).sum(axis=2) for first, last in ((0.0, 0.4), (0.4, 1.0))]
    np.testing.assert_allclose(sum(halves), np.stack((direct, forwarded, sent)).sum(axis=2))


def test_the_timeline_draws_what_each_rank_receives_and_sends_a_scale_for_each_side() -> None:
    plan = qwen()
    axes = plot_timeline(plan).axes[0]
    heights = np.array([patch.get_data().baseline - patch.get_data().values for patch in axes.patches])
    flows = np.stack(flows_by_slice(plan, 0.0, 1.0), axis=1)  # [ranks, 3, SLICES]
    assert heights.shape == (3 * plan.ranks, SLICES)
    drawn = heights.reshape(plan.ranks, 3, SLICES) * np.array([1, 1, -1])[:, None]
    for side in (slice(plan.source_ranks), slice(plan.source_ranks, None)):
        top = max((flows[side, 0] + flows[side, 1]).max(), flows[side, 2].max())
        np.testing.assert_allclose(drawn[side] / TIMELINE_HEIGHT, flows[side] / top, atol=1e-9)
    assert [tick.get_text() for tick in axes.get_yticklabels()][3:5] == ["trainer 3", "rollout 4"]


def test_the_timeline_of_many_ranks_shows_those_that_move_most() -> None:
    plan = qwen("Qwen3-0.6B", "tunix:fsdp=8,tp=2", "vllm:tp=1,replicas=10")
    labels = [tick.get_text() for tick in plot_timeline(plan).axes[0].get_yticklabels()]
    assert (len(labels), labels[TIMELINE_RANKS], labels[-1]) == (18, "and 8 more trainers", "and 2 more rollouts")
    traffic = plan.traffic()
    np.fill_diagonal(traffic, 0)
    moved = traffic.sum(axis=0) + traffic.sum(axis=1)
    shown = [int(label.split()[1]) for label in labels if "more" not in label]
    for side in (range(16), range(16, plan.ranks)):
        assert min(moved[r] for r in side if r in shown) >= max(moved[r] for r in side if r not in shown)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "shardfly_jax.plots", raising=False)
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=re.escape("pip install 'shardfly-jax[plot]'")):
        tiny().plot()


def test_a_topology_that_the_plan_was_made_for_is_the_one_it_predicts_for() -> None:
    source = {"w": sf.Layout((8, 4), "float32", {0: WHOLE})}
    fast, slow = sf.preset("h200"), dataclasses.replace(sf.preset("h20"), name="slow", nvlink_rate=1e9)
    plan = sf.make_plan(source, source, topology=slow)
    assert plan.simulate().secs == plan.simulate(slow).secs
    assert plan.simulate().bound_secs > plan.simulate(fast).bound_secs
    assert "slow: NVLink" in plan.explain()
    assert "H200: NVLink" in sf.make_plan(source, source, topology="h200").explain()
    unnamed = sf.make_plan(source, source)
    assert "H100 (assumed, as none was named): NVLink" in unnamed.explain()
    assert "assumed" not in unnamed.explain("h100")
    for wrong in (8, ["h100"]):
        with pytest.raises(sf.PlanError, match=r"topology: .* Give the name of a GPU"):
            unnamed.simulate(wrong)  # type: ignore[arg-type]
        with pytest.raises(sf.PlanError, match=r"topology: .* Give the name of a GPU"):
            sf.make_plan(source, source, topology=wrong)  # type: ignore[arg-type]


def test_codes_whose_scales_no_target_gets_are_told() -> None:
    format = sf.formats.Fp8Channel()
    weights = {f"{at}.w": sf.Layout((4, 8), "bfloat16", {0: [(0, 4), (0, 8)]}) for at in ("h.0", "h.1", "head")}
    codes = {name: sf.Layout((4, 8), format.stored, {0: [(0, 4), (0, 8)]}) for name in weights}
    scales = {f"h.{i}.s": sf.Layout((4, 1), "float32", {0: [(0, 4), (0, 1)]}) for i in range(2)}
    both = {name: sf.src(name).quantize(format) for name in ("h.{i}.w", "head.w")}
    some = sf.make_plan(weights, codes | scales, sf.Mapping(both | {"h.{i}.s": sf.scale_of("h.{i}.w")})).explain()
    assert "codes without a target for their scales (sf.scale_of): head.w\n" in some
    none = sf.make_plan(weights, codes, sf.Mapping(both)).explain()
    assert "codes without a target for their scales (sf.scale_of): h.{i}.w, head.w\n" in none
    all_of = sf.make_plan(
        weights, codes, sf.Mapping({name: sf.src(name).astype(format.codes) for name in both}), allow_cast="*"
    )
    assert "without a target" not in all_of.explain()
