"""An estimator with a part that learns beside the policy: each attempt against what its task came to before."""

from turnstile.credit.base import learned, to_tokens


class TaskMeans:
    """The mean total of each task's attempts, moving from step to step."""

    def __init__(self, *, decay: float = 0.9):  # share of the old mean that a step keeps
        self.decay = decay
        self.means = {}

    def predict(self, groups, scores):
        return {"mean": [self.means.get(group.task.id, 0.0) for group in groups]}

    def update(self, groups, scores, aux):
        for group, own, before in zip(groups, scores, aux["mean"], strict=True):
            totals = [score.total for score in own if score.in_baseline]
            if totals:
                mean = sum(totals) / len(totals)
                self.means[group.task.id] = self.decay * before + (1 - self.decay) * mean
        return {"critic/tasks": float(len(self.means))}

    def state(self):
        return self.means

    def restore(self, state):
        self.means = dict(state)


@learned("critic", "own_critic:TaskMeans")
def above_task_mean(groups, scores, aux):
    """A_i = S_i - what the task of attempt i came to before, given to every token of attempt i."""
    advantages = []
    for group, own, mean in zip(groups, scores, aux["mean"], strict=True):
        advantages += to_tokens(group, [score.total - mean if score.in_gradient else 0.0 for score in own])
    return advantages
