"""The RL loop: its rewards, its gradient, where its tokens come from, and that it learns through `sf.sync` alone."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import assert_same_bits
from flax import nnx

import shardfly_jax as sf
from shardfly_jax.__main__ import main
from shardfly_jax.rl import grpo, objective, rollout, task
from shardfly_jax.rl.curves import plot_rewards
from shardfly_jax.rl.options import Options
from shardfly_jax.rl.policy import Policy, answer_logps, chosen

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo.py"
ROWS = 512
SMALL = {"prompts": 32, "largest": 4, "steps": 110, "learning_rate": 3e-3}
"""All tests draw `ROWS` completions at a time: another number would be another program to compile."""


# The task


def test_an_answer_is_rewarded_only_if_it_reads_as_the_sum(rng: np.random.Generator) -> None:
    prompts = task.prompts(rng, 400, 9)
    sums = prompts[:, 0] + prompts[:, 2]
    right = np.stack([sums // 10, sums % 10], 1)
    answers = np.where(rng.random((400, 2)) < 0.5, right, rng.integers(0, len(task.ALPHABET), (400, 2)))
    tokens = np.concatenate([prompts, answers], 1)
    rewards = task.rewards(tokens)
    for row, reward in zip(tokens, rewards, strict=True):
        terms, answer = task.text(row).split("=", 1)
        first, second = terms.split("+")
        assert reward == float(answer == f"{int(first) + int(second):02}")
    assert 0 < rewards.mean() < 1


def test_prompts_hold_every_pair_of_numbers_up_to_the_largest(rng: np.random.Generator) -> None:
    found = {task.text(row) for row in task.prompts(rng, 2000, 3)}
    assert found == {f"{a}+{b}=" for a in range(4) for b in range(4)}


# The objective


def test_advantages_are_counted_in_the_deviations_of_the_group() -> None:
    rewards = np.array([[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 1]], np.float32)
    found = objective.advantages(rewards)
    np.testing.assert_allclose(found[0], [1, -1, -1, 1], rtol=1e-3)  # STD_EPSILON
    assert (found[1] == 0).all()
    np.testing.assert_allclose(found[2], np.array([-1, -1, -1, 3]) / math.sqrt(3), rtol=1e-3)


@pytest.mark.parametrize(
    ("ratio", "advantage", "passes"),
    [
        (1.0, 1.0, True),
        (1.0, -1.0, True),
        (1.5, 1.0, False),  # already more likely than the clip allows: no reason to go on
        (1.5, -1.0, True),  # the wrong way: must come back
        (0.5, 1.0, True),
        (0.5, -1.0, False),
    ],
)
@pytest.mark.parametrize("token", [0, 1])
def test_the_gradient_is_the_hand_computed_one(ratio: float, advantage: float, passes: bool, token: int) -> None:
    """Two tokens, p = (3/4, 1/4). d log p_0 / d logits = (1/4, -1/4), d log p_1 / d logits = (-3/4, 3/4)."""
    by_hand = {0: np.array([0.25, -0.25]), 1: np.array([-0.75, 0.75])}[token] * advantage * ratio * passes
    rollout_logp = math.log([0.75, 0.25][token] / ratio)

    def gain(logits: jax.Array) -> jax.Array:
        logps = jax.nn.log_softmax(logits)[None, None]
        return objective.terms(logps, logps[..., token], jnp.full((1, 1), rollout_logp), jnp.full((1,), advantage)).gain

    np.testing.assert_allclose(jax.grad(gain)(jnp.array([math.log(3), 0.0])), by_hand, atol=1e-6)


def test_the_objective_averages_over_tokens_and_adds_the_entropy() -> None:
    logps = jnp.log(jnp.array([[[0.75, 0.25], [0.5, 0.5]]]))
    drawn, behaviour = logps[..., 0], jnp.log(jnp.array([[0.5, 0.5]]))  # ratios 3/2, clipped to 6/5, and 1
    terms = objective.terms(logps, drawn, behaviour, jnp.array([2.0]))
    entropy = (-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) + math.log(2)) / 2
    expected = {"gain": (1.2 * 2 + 1 * 2) / 2, "entropy": entropy, "drift": (0.5 + 0) / 2, "clipped": 0.5}
    for name, value in expected.items():
        assert float(getattr(terms, name)) == pytest.approx(value, rel=1e-6), name
    assert float(terms.loss) == pytest.approx(-(expected["gain"] + objective.ENTROPY_BONUS * entropy), rel=1e-6)


# Tokens and their probabilities


def loop_with_random_weights(rng: np.random.Generator, **options: Any) -> grpo.Loop:
    """Its policy is far from uniform, so that probabilities tell weights apart."""
    loop = grpo.Loop(Options(**SMALL | options))
    randomize(loop.policy, rng)
    return loop


def randomize(policy: Policy, rng: np.random.Generator) -> None:
    state = nnx.state(policy, nnx.Param)
    fresh = jax.tree.map(lambda x: jax.device_put(rng.normal(0.3, 0.4, x.shape).astype(np.float32), x.sharding), state)
    nnx.update(policy, fresh)


def draw(loop: grpo.Loop, rng: np.random.Generator, weights: dict[str, jax.Array]) -> rollout.Completions:
    prompts = task.prompts(rng, ROWS, 9)
    key = jax.random.key(int(rng.integers(1 << 32)))
    return rollout.sample(weights, prompts, key, sizes=grpo.SIZES, mesh=loop.rollout_mesh)


@nnx.jit
def logps_of(policy: Policy, tokens: jax.Array) -> jax.Array:
    return chosen(answer_logps(policy, tokens), tokens)


def test_trainer_and_rollouts_agree_on_log_probabilities(rng: np.random.Generator) -> None:
    loop = loop_with_random_weights(rng)
    tokens, logps = map(np.asarray, draw(loop, rng, sf.sync(loop.policy, loop.plan)))
    assert logps.std() > 0.3, "the policy is so even that nothing is tested"
    exact = np.asarray(logps_of(loop.policy, tokens))
    np.testing.assert_allclose(logps, exact, atol=0.3)  # the rollouts' weights are rounded to bfloat16
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), nnx.state(loop.policy, nnx.Param))
    nnx.update(loop.policy, rounded)
    same = np.asarray(logps_of(loop.policy, tokens))
    np.testing.assert_allclose(logps, same, atol=1e-4)  # float32 sums in other orders
    assert np.abs(logps - exact).max() > 1e-3, "rounding made no difference, so the second check shows nothing"


def test_the_gradient_over_all_answers_is_that_of_the_expected_reward(rng: np.random.Generator) -> None:
    """The policy-gradient theorem on one prompt, all 144 answers enumerated: E[R grad log p] = grad E[R]."""
    policy = loop_with_random_weights(rng).policy
    letters = np.arange(len(task.ALPHABET))
    answers = np.stack([x.ravel() for x in np.meshgrid(letters, letters, indexing="ij")], 1)
    tokens = np.concatenate([np.repeat(task.prompts(rng, 1, 9), len(answers), 0), answers], 1)
    rewards = rng.random(len(tokens)).astype(np.float32)

    def expected_reward(policy: Policy) -> jax.Array:
        return jnp.exp(chosen(answer_logps(policy, tokens), tokens).sum(1)) @ rewards

    def gain(policy: Policy) -> jax.Array:
        logps = answer_logps(policy, tokens)
        drawn = jax.lax.stop_gradient(chosen(logps, tokens))  # on policy
        weights = jnp.exp(drawn.sum(1)) * rewards * drawn.size  # the objective is a mean over tokens
        return objective.terms(logps, chosen(logps, tokens), drawn, weights).gain

    want, have = (jax.tree.leaves(nnx.jit(nnx.grad(f))(policy)) for f in (expected_reward, gain))
    for x, y in zip(want, have, strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-3, atol=1e-5)  # float32 sums of 144 rows in other orders
    assert max(float(jnp.abs(x).max()) for x in want) > 1e-3


def test_tokens_come_from_the_synced_weights_only(rng: np.random.Generator) -> None:
    loop = loop_with_random_weights(rng)
    prompts, key = task.prompts(rng, ROWS, 9), jax.random.key(0)

    def drawn(weights: dict[str, jax.Array]) -> np.ndarray:
        return np.asarray(rollout.sample(weights, prompts, key, sizes=grpo.SIZES, mesh=loop.rollout_mesh).tokens)

    before, changed = drawn(sf.sync(loop.policy, loop.plan)), []
    for _ in range(4):  # as weights are random, so is how much they change: 0.49 to 0.93 of the rows in 25 draws
        randomize(loop.policy, rng)
        assert (drawn(sf.params(loop.plan)) == before).all(), "the trainer's new weights were seen before a sync"
        after = drawn(sf.sync(loop.policy, loop.plan))
        changed.append((after != before).any(axis=1).mean())
        before = after
    assert np.mean(changed) > 0.5
    assert min(changed) > 0, "old weights were served"
    nnx.update(loop.policy, jax.tree.map(lambda x: x * np.nan, nnx.state(loop.policy, nnx.Param)))
    assert np.isfinite(np.asarray(draw(loop, rng, sf.params(loop.plan)).logps)).all()


def test_tokens_are_drawn_with_the_reported_probabilities_and_differ_between_replicas(
    rng: np.random.Generator,
) -> None:
    loop = loop_with_random_weights(rng)
    weights = sf.sync(loop.policy, loop.plan)
    prompts, rounds, seed = np.repeat(task.prompts(rng, 1, 9), ROWS, 0), 8, int(rng.integers(1 << 32))
    parts = [
        rollout.sample(weights, prompts, jax.random.key(seed + k), sizes=grpo.SIZES, mesh=loop.rollout_mesh)
        for k in range(rounds)
    ]
    first = np.concatenate([np.asarray(part.tokens)[:, task.PROMPT] for part in parts])
    logps = np.concatenate([np.asarray(part.logps)[:, 0] for part in parts])
    for token in np.unique(first):
        p = float(np.exp(logps[first == token]).mean())
        deviation = math.sqrt(p * (1 - p) / len(first))
        assert abs((first == token).mean() - p) < 5 * deviation + 1 / len(first), (token, p)
    tokens = np.asarray(parts[0].tokens)
    assert (tokens[: ROWS // 2] != tokens[ROWS // 2 :]).any()


# The loop


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "async", "frozen"])
def test_the_loop_learns_if_and_only_if_it_syncs(mode: str) -> None:
    """One fixed seed: whether a policy learns in so few steps is a matter of luck otherwise."""
    loop = grpo.Loop(Options(mode=mode, **SMALL))
    steps = []
    for step in loop:
        steps.append(step)
        if mode != "frozen" and step.number % 20 == 0:
            assert sf.verify(loop.policy, loop.plan) == loop.plan.target_nbytes
    age = {"sync": lambda k: 0, "async": lambda k: min(k - 1, 1), "frozen": lambda k: k - 1}[mode]
    assert [s.trainer_version - s.rollout_version for s in steps] == [age(k) for k in range(1, len(steps) + 1)]
    last = 1 if mode == "frozen" else SMALL["steps"] + 1
    assert dict(loop.plan.version) == {"rollout/0": last, "rollout/1": last}
    start, end = (float(np.mean([s.reward for s in part])) for part in (steps[:10], steps[-10:]))
    assert start < 0.05
    assert {s.sync_secs is None for s in steps} == {mode == "frozen"}
    if mode == "frozen":
        assert max(s.reward for s in steps) < 0.05
    else:
        assert end > 0.8
    # What the importance ratio has to correct: rounding only; weights one step old; weights ever older.
    drift = float(np.mean([s.drift for s in steps]))
    low, high = {"sync": (0.0, 0.005), "async": (0.01, 0.08), "frozen": (0.08, math.inf)}[mode]
    assert low < drift < high


def test_async_rollouts_draw_with_the_whole_version_they_report_although_sync_writes_in_place(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every batch of a loop is drawn again afterwards, from copies of the weights that it was given.

    The trainer does not wait for anything, so that each sync finds the rollouts drawing.
    """
    drawn = []
    sample = rollout.sample

    def recorded(weights: dict[str, jax.Array], *given: Any, **more: Any) -> rollout.Completions:
        copies = {name: np.array(x) for name, x in weights.items()}
        completions = sample(weights, *given, **more)
        drawn.append((copies, given, completions))
        return completions

    monkeypatch.setattr(rollout, "sample", recorded)
    loop = loop_with_random_weights(rng, mode="async", steps=12)

    def train(completions: rollout.Completions) -> tuple[np.ndarray, objective.Terms]:
        randomize(loop.policy, rng)
        return np.zeros((2, 2)), objective.Terms(*(jnp.zeros(()) for _ in range(4)))

    monkeypatch.setattr(loop, "train", train)
    assert len(list(loop)) == 12
    monkeypatch.undo()
    shardings = {name: x.sharding for name, x in sf.params(loop.plan).items()}
    assert len(drawn) == 13
    versions = {b"".join(x.tobytes() for x in copies.values()) for copies, _, _ in drawn}
    assert len(versions) == 12, "the first two batches share version 1"
    for copies, given, completions in drawn:
        again = sample(jax.device_put(copies, shardings), *given, sizes=grpo.SIZES, mesh=loop.rollout_mesh)
        for have, want in zip(completions, again, strict=True):
            assert_same_bits(have, np.asarray(want))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mode": "fast"}, "'fast', but one of"),
        ({"largest": 10}, "largest is 10"),
        ({"largest": 0}, "largest is 0"),
        ({"steps": 0}, "fewer than 1"),
        ({"prompts": 3, "completions": 5}, "3 x 5 answers"),
    ],
)
def test_options_that_cannot_be_right_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(sf.PlanError, match=said):
        Options(**wrong)


def test_too_few_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    few = jax.devices()[:7]
    monkeypatch.setattr(jax, "devices", lambda: few)
    with pytest.raises(sf.PlanError, match="7 devices, but 8 are needed"):
        grpo.Loop(Options())


# The command


def test_the_command_shows_versions_and_draws_the_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "new" / "rewards.png"
    small = ["--prompts", "32", "--learning-rate", "0.003", "--steps", "3"]
    assert main(["rl", "--mode", "async", *small, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "trained v3 on v2's tokens" in out
    assert [line.split()[1:6:2] for line in out.splitlines() if "│" in line] == [
        ["1", "v1", "v1"], ["2", "v2", "v1"], ["3", "v3", "v2"]
    ]  # fmt: skip
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_run_repeats_bit_for_bit_with_its_seed_and_not_with_another() -> None:
    def rewards(seed: int) -> list[tuple[float, float, str]]:
        options = Options(mode="async", seed=seed, **SMALL | {"steps": 3})
        return [(s.reward, s.entropy, s.sample) for s in grpo.Loop(options)]

    assert rewards(5) == rewards(5)
    assert rewards(5) != rewards(6)


def test_curves_name_every_run_with_its_last_reward() -> None:
    def steps(reward: float) -> list[grpo.Step]:
        return [
            grpo.Step(
                number=k, rollout_version=k, reward=reward, drift=0.0, clipped=0.0, entropy=0.0,
                sample="", sync_secs=0.0,
            ) for k in range(1, 30)
        ]  # fmt: skip

    (axes,) = plot_rewards({"a": steps(0.25), "b": steps(0.75)}).axes
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[:2] == ["a: 0.25 at the end", "b: 0.75 at the end"]
    assert labels[2:] == ["thin: a step; thick: mean of 10", "chance: 0.007"]


@pytest.mark.parametrize(("missing", "extra"), [("optax", "rl"), ("matplotlib", "plot")])
def test_a_missing_extra_is_named(
    missing: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("plots", "rl.command", "rl.curves", "rl.grpo"):
        monkeypatch.delitem(sys.modules, f"shardfly_jax.{name}", raising=False)
    for name in ("command", "curves", "grpo"):
        monkeypatch.delattr(sys.modules["shardfly_jax.rl"], name, raising=False)
    assert main(["rl"]) == 2
    assert f"pip install 'shardfly-jax[{extra}]'" in capsys.readouterr().err


def test_the_example_is_the_file_that_the_command_runs() -> None:
    assert grpo.__file__ is not None
    assert EXAMPLE.samefile(grpo.__file__)
    done = subprocess.run([sys.executable, str(EXAMPLE), "--help"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--mode {sync,async,frozen}" in done.stdout
