"""Saved plans: what comes back is the same plan, or a `PlanFileError`; and plans that are not the wanted one."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from checks import assert_holds, fresh, like, mesh, poison_buffers, put, registered_bytes

import shardfly_jax as sf
from shardfly_jax.sharding.moves import MoveTable

MAPPING = sf.Mapping(
    {
        "qkv.{i}": sf.fuse(
            sf.src("q.{i}").rearrange("d n h -> (n h) d"), sf.src("k.{i}").repeat(2, axis=1)[:, ::-1, :].rearrange(
                "d n h -> (n h) d"), axis=0,
        ).astype("bfloat16"),
        "experts.{i}": sf.src("e")["{i}"].take({0: [1, 0, -1], 1: [2, 2, 0]}, axis=0).scale(0.3, 1.0),
        "embed": sf.concat([sf.src("v").pad([(0, 2), (0, 0)], -1.5), sf.src("v")[1:3].divide(3.0)]),
        "head": sf.alias("embed"),
        "both": sf.stack([sf.src("v"), sf.src("v")]),
    }
)  # fmt: skip
SHAPES = {"q.0": (4, 4, 2), "q.1": (4, 4, 2), "k.0": (4, 2, 2), "k.1": (4, 2, 2), "e": (2, 3, 4), "v": (6, 4)}
TARGETS = {
    "qkv.0": (16, 4), "qkv.1": (16, 4), "experts.0": (3, 4), "experts.1": (3, 4), "embed": (10, 4), "head": (10, 4),
    "both": (2, 6, 4),
}  # fmt: skip


def planned() -> sf.Plan:
    over, rollout = mesh((2,), "x"), mesh((2, 2), "dp tp", [4, 5, 6, 7])
    source = {name: like(shape, "float32", over, "x") for name, shape in SHAPES.items()}
    cuts = {"qkv.0": ("tp",), "qkv.1": ("tp",), "embed": (None, "tp"), "head": (None, "tp")}
    target = {
        name: like(shape, "bfloat16" if "qkv" in name else "float32", rollout, *cuts.get(name, ()))
        for name, shape in TARGETS.items()
    }
    return sf.make_plan(source, target, MAPPING)


def saved(plan: sf.Plan) -> bytes:
    buffer = io.BytesIO()
    plan.save(buffer)
    return buffer.getvalue()


def load(data: bytes) -> sf.Plan:
    return sf.load_plan(io.BytesIO(data))


def test_a_loaded_plan_is_the_saved_one(tmp_path: Path) -> None:
    plan = planned()
    plan.save(tmp_path / "any.name")
    assert [path.name for path in tmp_path.iterdir()] == ["any.name"]
    back = sf.load_plan(tmp_path / "any.name", digest=plan.digest)
    assert back == plan
    assert back.digest == plan.digest
    assert list(back.moves) == list(plan.moves)
    assert (back.families, back.conversions, back.replicas) == (plan.families, plan.conversions, plan.replicas)
    assert sf.load_plan(str(tmp_path / "any.name")).digest == plan.digest


def test_a_loaded_plan_updates_as_the_made_one_does(rng: np.random.Generator) -> None:
    made = sf.register(planned())
    loaded = sf.register(load(saved(made)))
    values = {name: fresh(rng, *shape) for name, shape in SHAPES.items()}
    params = {name: put(x, mesh((2,), "x"), "x") for name, x in values.items()}
    for plan in (made, loaded):
        poison_buffers(plan)
        sf.sync(params, plan)
    assert registered_bytes(made) == registered_bytes(loaded)
    assert sf.verify(params, loaded) == made.target_nbytes


def test_a_loaded_plan_takes_the_buffers_of_an_owner(rng: np.random.Generator) -> None:
    """The plan file knows no devices: ranks are counted in the mesh order of what it is given."""
    over, rollout = mesh((4,), "x", [3, 1, 0, 2]), mesh((2,), "y", [6, 5])
    params, x = {}, fresh(rng, 8, 6)
    params["w"] = put(x, over, "x")
    owner = {"w": put(fresh(rng, 8, 6), rollout, None, "y")}
    plan = sf.register(load(saved(sf.make_plan(params, owner))), owner)
    poison_buffers(plan)
    out = sf.sync(params, plan)
    assert_holds(out["w"], x)
    assert_holds(owner["w"], x)


def test_a_file_cut_short_is_refused() -> None:
    data = saved(planned())
    for size in sorted(
        {0, 1, 4, len(data) // 2, len(data) - 22, len(data) - 1, *range(100, len(data), len(data) // 40)}
    ):
        with pytest.raises(sf.PlanFileError, match="Make the plan again"):
            load(data[:size])


@pytest.mark.filterwarnings("ignore")  # of NumPy and zipfile, about what they read
def test_a_file_with_any_damaged_byte_is_refused_or_still_the_same_plan(rng: np.random.Generator) -> None:
    """Some bytes, such as time stamps, mean nothing. No other error, and never another plan."""
    plan = planned()
    data = saved(plan)
    escaped = {}
    for position in rng.choice(len(data), 500, replace=False).tolist():
        damaged = bytearray(data)
        damaged[position] ^= int(rng.integers(1, 256))
        try:
            assert load(bytes(damaged)) == plan
        except sf.PlanFileError:
            continue
        except Exception as error:
            escaped.setdefault(type(error).__name__, (position, bytes(damaged[position : position + 1]), str(error)))
    assert not escaped


def archive(**arrays: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a plan at all",
        pickle.dumps({"moves": 1}),
        archive(),
        archive(weights=np.zeros(3)),
        archive(header=np.zeros(3)),
        *(
            archive(header=np.frombuffer(text, np.uint8))
            for text in (b"null", b"[]", b"3", b"{}", b'{"format": 1}', b"{")
        ),
    ],
)
def test_a_file_that_is_no_plan_is_refused(data: bytes) -> None:
    with pytest.raises(sf.PlanFileError, match=r"(is no plan file|has format).*Make the plan again") as caught:
        load(data)
    assert "pickle" not in str(caught.value)


def test_a_numpy_array_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros(3))
    for path in (tmp_path / "array.npy", tmp_path):
        with pytest.raises(sf.PlanFileError, match=path.name):
            sf.load_plan(path)
    with pytest.raises(FileNotFoundError):
        sf.load_plan(tmp_path / "absent")


def rewritten(plan: sf.Plan, change: dict[str, object], **columns: np.ndarray) -> bytes:
    """The plan's file with parts of its header and table replaced and the old digest kept."""
    with np.load(io.BytesIO(saved(plan))) as file:
        arrays = {name: file[name] for name in file.files} | columns
    header = json.loads(arrays["header"].tobytes()) | change
    return archive(**{**arrays, "header": np.frombuffer(json.dumps(header).encode(), np.uint8)})


def test_a_file_of_another_format_version_is_refused() -> None:
    with pytest.raises(sf.PlanFileError, match="format 99"):
        load(rewritten(planned(), {"format": 99}))


def test_a_format_that_is_refused_by_now_is_named_with_the_reason() -> None:
    over = mesh((1,), "x")
    target = {"w": like((4, 64), "float8_e4m3fn", over), "s": like((4, 2), "uint8", over)}
    mapping = sf.Mapping({"w": sf.src("w").quantize(sf.formats.MxFp8()), "s": sf.scale_of("w")})
    plan = sf.make_plan({"w": like((4, 64), "float32", over)}, target, mapping)
    with np.load(io.BytesIO(saved(plan))) as file:
        families = json.dumps(json.loads(file["header"].tobytes())["families"])
    assert '"floor": 0.0' in families
    older = rewritten(plan, {"families": json.loads(families.replace('"floor": 0.0', '"floor": 0.5'))})
    with pytest.raises(sf.PlanFileError, match=r"MxFp8' is refused by now: format: floor is 0\.5.*Make the plan again"):
        load(older)


def test_a_file_whose_contents_do_not_match_its_digest_is_refused() -> None:
    plan = planned()
    assert load(rewritten(plan, {})) == plan
    with pytest.raises(sf.PlanFileError, match="damaged"):
        load(rewritten(plan, {}, source_offset=plan.moves.source_offset + 1))
    with pytest.raises(sf.PlanFileError, match="damaged"):
        load(rewritten(plan, {"source_ranks": 3}))
    with pytest.raises(sf.PlanFileError):
        load(rewritten(plan, {}, another_column=plan.moves.source_offset))


def test_a_plan_of_another_digest_is_refused(tmp_path: Path) -> None:
    plan = planned()
    plan.save(tmp_path / "plan")
    with pytest.raises(sf.DigestMismatch, match=rf"plan {plan.digest[:12]}, but 000000000000 is wanted.*same inputs"):
        sf.load_plan(tmp_path / "plan", digest="0" * 64)


def test_a_plan_that_carries_the_session_of_another_is_refused(rng: np.random.Generator) -> None:
    over, rollout = mesh((2,), "x"), mesh((2,), "y", [4, 5])
    params = {"a": put(fresh(rng, 4, 4), over, "x")}
    one = sf.register(sf.make_plan(params, {"a": like((4, 4), "float32", rollout)}))
    other = sf.make_plan(params, {"a": like((4, 4), "float32", rollout, "y")})
    sf.sync(params, one)
    before = registered_bytes(one)
    mixed = dataclasses.replace(other, session=one.session)
    for use in (lambda: sf.sync(params, mixed), lambda: sf.params(mixed), lambda: sf.verify(params, mixed)):
        with pytest.raises(sf.DigestMismatch, match=f"{other.digest[:12]}.*{one.digest[:12]}.*Register it anew"):
            use()
    assert registered_bytes(one) == before
    assert set(one.version.values()) == {1}


def test_the_digest_sees_every_part_of_a_plan() -> None:
    plan = planned()
    assert plan.digest == planned().digest
    digests = {plan.digest}
    for name, column in plan.moves.columns.items():
        changed = column.copy()
        changed.flat[-1] += 1
        moves = MoveTable.from_columns(**{**plan.moves.columns, name: changed})
        digests.add(dataclasses.replace(plan, moves=moves).digest)
    for change in (
        {"bands": plan.bands + 1}, {"source_ranks": plan.source_ranks + 1}, {"keep": ("x",)},
        {"replicas": plan.replicas[::-1]}, {"families": plan.families[::-1]}, {"conversions": plan.conversions[::-1]},
    ):  # fmt: skip
        digests.add(dataclasses.replace(plan, **change).digest)
    assert len(digests) == 1 + len(plan.moves.columns) + 6
