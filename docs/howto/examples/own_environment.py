"""An environment of one's own, and a model trained in it: walk along a line to a place that is named.

python own_environment.py [MODEL]
"""

import sys

import turnstile
from turnstile.envs.base import Start, Step
from turnstile.tasks.demonstration import DemoStep, call
from turnstile.types import Message, Task, ToolSpec

NOTHING = {"type": "object", "properties": {}}
TOOLS = tuple(ToolSpec(name=way, description=f"Go one {way}.", schema=NOTHING) for way in ("left", "right"))


class Walk:
    """One episode: from where the task begins to where it wants one to be."""

    async def reset(self, task):
        self.at, self.goal = task.data["start"], task.data["goal"]
        return Start(messages=(Message(role="user", content=f"Go to {self.goal}. You are at {self.at}."),), tools=TOOLS)

    async def step(self, message):
        way = message.tool_calls[0].name if message.tool_calls else ""
        self.at += {"left": -1, "right": 1}.get(way, 0)
        said = Message(role="user", content=f"You are at {self.at}." if way else "Say left or right.")
        return Step(messages=(said,), terminated=self.at == self.goal, signals={"parsed": bool(way)})

    async def measure(self):
        return {"resolved": self.at == self.goal, "distance": abs(self.goal - self.at)}

    def state_key(self):
        return f"{self.at} to {self.goal}"

    async def close(self):
        pass


def demonstrate(task, rng):
    """The shortest way, for the warm start."""
    steps = task.data["goal"] - task.data["start"]
    return [DemoStep(message=call("right" if steps > 0 else "left"))] * abs(steps)


TASKS = [
    Task(id=f"walk-{start}-{goal}", env="walk", data={"start": start, "goal": goal})
    for start in range(1, 10)
    for goal in range(1, 10)
    if 1 <= abs(start - goal) <= 4
]
RECIPE = {
    "name": "walk",
    "model": {"id": sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m", "train": "top", "top_layers": 6},
    "agent": {"renderer": {"kind": "lines"}, "parser": {"kind": "lines"}},
    "sampling": {"max_tokens": 4},
    "episode": {"turns": 6},
    "rewards": {"terms": [{"kind": "signal", "name": "resolved", "level": 1}, {"kind": "valid_format", "weight": 0.1}]},
    "sft": {"demos": 64, "demonstrator": {"kind": "__main__:demonstrate"}},
    "rollout": {"tasks_per_step": 4},
    "train": {"steps": 4, "lr": 1e-4},
}

if __name__ == "__main__":
    done = turnstile.train(RECIPE, env=Walk, tasks=TASKS[::2], heldout=TASKS[1::2])
    for name, episodes in done["results"].items():
        print(name, sum(episode.rates["resolution"] for episode in episodes), "of", len(episodes), "solved")
    print("read the report:", done["report"])
