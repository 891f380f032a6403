"""The composition root: the only room that knows the whole house."""

from turnstile.build.dry_run import dry_run
from turnstile.build.evaluate import evaluate
from turnstile.build.train import train

__all__ = ["dry_run", "evaluate", "train"]
