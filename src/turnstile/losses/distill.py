"""On-policy distillation from a teacher, or from the policy given feedback."""

from __future__ import annotations

from torch import Tensor

from turnstile.batching.batch import Batch
from turnstile.credit.invariants import at, declare
from turnstile.lookup import Part
from turnstile.losses.base import NO_REWARD, Metrics, extra, needs
from turnstile.losses.kl import Estimator, divergence


@declare(at(NO_REWARD))
@needs("teacher_logprobs")
def distill(logprobs: Tensor, batch: Batch, *, estimator: Estimator = "k1") -> tuple[Tensor, Metrics]:
    """Return KL(pi || teacher), estimated at each sampled token: on-policy distillation by the reverse divergence.

    MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649, on the student's own tokens. The teacher's log-probabilities are
    `batch.extras["teacher_logprobs"]` f32[N]. Each token accounts only for itself, not for later tokens. Value and
    gradient are those of the loss `kl` with the teacher as the reference: estimated from the sampled token, with the
    expected gradient of the divergence itself.

    logprobs f32[N] -> loss f32[N]; metric kl_teacher (nats). Raises ConfigError without a teacher.
    """
    value = divergence(logprobs, batch, extra(batch, "teacher_logprobs", "distill"), estimator, "distill")
    return value, {"kl_teacher": value.detach()}


@declare(at(NO_REWARD))
@needs("feedback_logprobs", provider=Part(section="feedback", path="turnstile.trainer.feedback:Feedback"))
def self_distill(logprobs: Tensor, batch: Batch, *, estimator: Estimator = "k1") -> tuple[Tensor, Metrics]:
    """Return KL(pi || sg[pi given feedback]), estimated at each sampled token (SDPO, arXiv 2601.20802; RLTF).

    `batch.extras["feedback_logprobs"]` f32[N] are the policy's own log-probabilities of its tokens once it has read
    feedback on them. SDPO computes the divergence over the whole vocabulary. This estimate from the sampled token has
    the same expected gradient and needs only one number per token. Only the teacher's context contains the feedback;
    `[loss.feedback]` chooses its content.

    logprobs f32[N] -> loss f32[N]; metric kl_feedback (nats). Raises ConfigError without these log-probabilities.
    """
    value = divergence(logprobs, batch, extra(batch, "feedback_logprobs", "self_distill"), estimator, "self_distill")
    return value, {"kl_feedback": value.detach()}
