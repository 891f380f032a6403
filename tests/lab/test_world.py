"""Listed worlds: probabilities, the exact gradient against differences, values, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from turnstile.errors import ConfigError
from turnstile.lab.process import THREE, Process, ends
from turnstile.lab.processes import PROCESSES, make
from turnstile.lab.world import list_world, some_policy, truth


@pytest.mark.parametrize("name", PROCESSES)
def test_the_paths_of_every_task_are_all_there(name: str) -> None:
    world = list_world(make(name))
    pi = world.policy(some_policy(world))
    found = truth(world, pi)
    for task in range(len(world.process.starts)):
        assert found.probabilities[world.task == task].sum() == pytest.approx(1.0, abs=1e-12)
    assert np.bincount(world.node, weights=pi) == pytest.approx(np.ones(world.nodes))
    assert all(1 <= len(step.tokens) <= 3 for path in world.paths for step in path.steps)


@pytest.mark.parametrize("name", [name for name in PROCESSES if name != "two_seat"])
def test_the_gradient_is_that_of_differences(name: str) -> None:
    world = list_world(make(name))
    theta = some_policy(world, seed=3)
    found, step = truth(world, world.policy(theta)), 1e-5
    for d in range(world.parameters):
        shift = step * (np.arange(world.parameters) == d)
        above, below = (truth(world, world.policy(theta + sign * shift)) for sign in (1, -1))
        assert found.gradient[d] == pytest.approx((above.value - below.value) / (2 * step), abs=1e-9)
        assert found.outcome_gradient[d] == pytest.approx((above.outcome - below.outcome) / (2 * step), abs=1e-9)


@pytest.mark.parametrize("name", PROCESSES)
def test_the_exact_advantage_gives_the_exact_gradient(name: str) -> None:
    world = list_world(make(name))
    pi = world.policy(some_policy(world))
    found = truth(world, pi)
    share = found.probabilities / len(world.process.starts)
    assert share @ world.scores(pi, found.advantage) == pytest.approx(found.gradient, abs=1e-12)
    # an advantage has mean zero wherever a token is chosen, and so has a baseline's share of the gradient
    assert share @ world.scores(pi, found.baseline) == pytest.approx(np.zeros(world.parameters), abs=1e-12)


def test_seats_answer_for_their_own_outcome() -> None:
    world = list_world(make("two_seat", pile=4))
    theta = some_policy(world)
    found = truth(world, world.policy(theta))
    assert found.value == pytest.approx(0.0, abs=1e-12)  # one wins what the other loses
    # with four left, one stone taken leaves the other a win in one move, and three leave it as well
    at_four = {name: d for d, name in enumerate(world.names) if name.startswith("4 left | ")}
    assert np.linalg.norm(found.gradient[list(at_four.values())]) > 0.01


def test_a_hand_made_process() -> None:
    """Two equal actions worth 1 and 3: J = 2, and dJ = p (S - J) (1, -1) at the two logits."""
    process = Process(
        name="bandit",
        starts=((),),
        menu=lambda state: ((0,), (1,)),
        step=lambda state, action: (ends((1.0, 3.0)[action]),),
        view=str,
        key=str,
        knobs={},
    )
    world = list_world(process)
    found = truth(world, world.policy(np.zeros(2)))
    assert (found.value, found.outcome) == (2.0, 2.0)
    assert found.gradient == pytest.approx([-0.5, 0.5])
    assert found.baseline == pytest.approx([2.0, 2.0])
    assert found.advantage == pytest.approx([-1.0, 1.0])
    assert world.entropies(world.policy(np.zeros(2))) == pytest.approx(np.log([2.0, 2.0]))


def test_a_process_too_large_and_one_unknown_are_refused() -> None:
    with pytest.raises(ConfigError, match="over 20000 paths"):
        list_world(make("delayed", horizon=10))
    with pytest.raises(ConfigError, match="did you mean 'lock'"):
        make("look")
    assert THREE[1] == (1, 0)
