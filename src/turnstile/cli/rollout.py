"""The command `turnstile rollout`."""

from __future__ import annotations

from turnstile.cli.main import LazyGroup

rollout = LazyGroup(
    name="rollout",
    lazy={
        "show": ("turnstile.cli.rollout_show:show", "Show one episode turn by turn, or token by token."),
        "rescore": ("turnstile.cli.rollout_rescore:rescore_run", "Judge a recorded run by other rewards."),
        "list": ("turnstile.cli.rollout_list:list_episodes", "List the recorded episodes, one a line."),
    },
    help="Every episode of a run is recorded: what was shown, sampled, rewarded, credited and trained.",
)
