"""The handler for tunix' weight sync: against tunix' contract where it is installed, else a stand-in of its types."""

from __future__ import annotations

import abc
import dataclasses
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from engine_checks import mesh
from jax.sharding import NamedSharding, PartitionSpec as P

import shardfly_jax as sf
from shardfly_jax.adapters import tunix as adapter

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # tunix' imports from JAX
EXAMPLE = Path(__file__).parents[1] / "examples" / "tunix_weight_sync.py"


def stand_in() -> types.ModuleType:
    """The types that a handler meets, by the docstrings of tunix' contract."""
    module = types.ModuleType(adapter.CONTRACT)

    @dataclasses.dataclass(frozen=True)
    class TransferResult:
        req_id: str
        success: bool
        message: str = ""

    class WeightSyncHandler(abc.ABC):
        @abc.abstractmethod
        def register_work_unit(self, metadata: Any) -> None: ...

        @abc.abstractmethod
        def transfer(self, src_units: Any, dst_units: Any, req_id: Any = None, generation: Any = None) -> Any: ...

    module.TransferResult = TransferResult
    module.TransferOutcomeUnknownError = type("TransferOutcomeUnknownError", (RuntimeError,), {})
    module.WeightSyncHandler = WeightSyncHandler
    module.WorkUnitId = dataclasses.make_dataclass("WorkUnitId", ["job_name"], frozen=True)
    module.WorkUnitMetadata = dataclasses.make_dataclass("WorkUnitMetadata", ["unit"], frozen=True)
    return module


@pytest.fixture
def contract(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    try:
        return importlib.import_module(adapter.CONTRACT)
    except ImportError:
        module = stand_in()
        monkeypatch.setitem(sys.modules, adapter.CONTRACT, module)
        return module


class Trainer:
    """Holds new weights after every step."""

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.sharding = NamedSharding(mesh((4,), ("fsdp",)), P("fsdp"))
        self.step()

    def step(self) -> None:
        self.params = {"w": jax.device_put(self.rng.standard_normal((8, 4), np.float32), self.sharding)}


def made(contract: types.ModuleType, trainer: Trainer) -> tuple[adapter.Handler, list[Any], list[Any]]:
    """A handler, and the units of both sides."""
    served = jax.ShapeDtypeStruct((4, 8), "float32", sharding=NamedSharding(mesh((2,), ("tp",), 4), P("tp")))
    mapping = sf.Mapping({"w": sf.src("w").rearrange("a b -> b a")})
    handler = adapter.Handler(sf.make_plan(trainer.params, {"w": served}, mapping), lambda: trainer.params)
    units = [contract.WorkUnitId(job_name=name) for name in ("trainer", "rollout")]
    for unit in units:
        handler.register_work_unit(contract.WorkUnitMetadata(unit=unit))
    return handler, units[:1], units[1:]


def held(tree: Any) -> np.ndarray:
    """What is in the buffers now: NumPy's own reading would be the cached copy of the first one."""
    return np.concatenate([np.from_dlpack(shard.data) for shard in tree["w"].addressable_shards])


def test_what_serves_stays_until_a_round_is_published(contract: types.ModuleType, rng: np.random.Generator) -> None:
    trainer = Trainer(rng)
    handler, src, dst = made(contract, trainer)
    assert isinstance(handler, contract.WeightSyncHandler)
    serving, want = None, None
    for round_ in range(4):
        trainer.step()
        req_id = f"r{round_}"
        assert handler.transfer(src, dst, req_id=req_id, generation=round_ + 1) == contract.TransferResult(
            req_id=req_id, success=True
        )
        if serving is not None:
            np.testing.assert_array_equal(held(serving), want)
        np.testing.assert_array_equal(held(handler.staged(req_id)), np.asarray(trainer.params["w"]).T)
        if round_ == 2:  # aborted: its buffers are written again, and what serves stays
            continue
        serving, want = handler.publish(req_id), np.asarray(trainer.params["w"]).T
        assert handler.publish(req_id) is serving
        np.testing.assert_array_equal(held(serving), want)
        with pytest.raises(sf.NoUpdate, match="Transfer it first"):
            handler.staged(req_id)
    with pytest.raises(sf.NoUpdate, match="'r2' is wanted"):
        handler.publish("r2")


def test_a_round_that_fails_says_why_and_leaves_what_serves(
    contract: types.ModuleType, rng: np.random.Generator
) -> None:
    trainer = Trainer(rng)
    handler, src, dst = made(contract, trainer)
    handler.transfer(src, dst, req_id="good")
    serving, want = handler.publish("good"), np.asarray(trainer.params["w"]).T
    strangers = [contract.WorkUnitId(job_name="another")]
    for units, word in (((src, strangers), "another"), ((src, []), "one side has no units")):
        result = handler.transfer(*units, req_id="bad")
        assert not result.success
        assert word in result.message
    trainer.params = {"w": trainer.params["w"][:4]}
    result = handler.transfer(src, dst, req_id="bad")
    assert not result.success
    assert result.message.startswith("ParamsMismatch")
    with pytest.raises(sf.NoUpdate):
        handler.publish("bad")
    np.testing.assert_array_equal(held(serving), want)


@pytest.mark.parametrize("req_id", [None, "again", ""])
def test_a_round_without_an_id_or_of_a_used_one_serves_its_own_weights(
    contract: types.ModuleType, rng: np.random.Generator, req_id: str | None
) -> None:
    trainer = Trainer(rng)
    handler, src, dst = made(contract, trainer)
    for _ in range(3):
        trainer.step()
        result = handler.transfer(src, dst, req_id=req_id)
        assert result.success
        assert isinstance(result.req_id, str)
        serving = handler.publish(result.req_id)
        assert handler.publish(result.req_id) is serving
        np.testing.assert_array_equal(held(serving), np.asarray(trainer.params["w"]).T)
    failed = handler.transfer(src, [], req_id=req_id)
    assert not failed.success
    with pytest.raises(sf.NoUpdate, match="nothing is staged"):
        handler.publish(failed.req_id)


def test_no_round_is_called_none(contract: types.ModuleType, rng: np.random.Generator) -> None:
    handler, src, dst = made(contract, Trainer(rng))
    for ask in (handler.staged, handler.publish):
        with pytest.raises(sf.NoUpdate, match="None is wanted, but nothing is staged"):
            ask(None)
    first, second = (handler.transfer(src, dst).req_id for _ in range(2))
    assert first != second
    with pytest.raises(sf.NoUpdate, match=rf"{first!r} is wanted, but what is staged is {second!r}"):
        handler.publish(first)


def test_a_rank_that_does_not_answer_leaves_the_outcome_unknown(
    contract: types.ModuleType, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    handler, src, dst = made(contract, Trainer(rng))

    def late(params: Any, plan: sf.Plan) -> None:
        raise sf.SyncTimeout("rank 3 waited for rank 1")

    monkeypatch.setattr(adapter, "sync", late)
    with pytest.raises(contract.TransferOutcomeUnknownError, match="rank 3"):
        handler.transfer(src, dst, req_id="r")


def test_a_tunix_without_the_contract_is_refused(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setitem(sys.modules, adapter.CONTRACT, None)
    with pytest.raises(sf.RegistrationError, match="Install google-tunix from its repository"):
        adapter.Handler(sf.make_plan(Trainer(rng).params, Trainer(rng).params), dict)


@pytest.fixture
def example() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("tunix_weight_sync", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_tunix_own_coordinator_commits_rounds_and_survives_a_failed_one(example: types.ModuleType) -> None:
    try:
        importlib.import_module("tunix.experimental.orchestrator.weight_sync_coordinator")
    except ImportError:
        pytest.skip("needs tunix' experimental orchestrator, which no release has yet")
    example.main()
