"""Hints for users of other trainers, such as TRL, verl or OpenRLHF, who type those trainers' keys in a recipe."""

from __future__ import annotations

from collections.abc import Iterable

from turnstile.lookup import nearest

_WORDS: tuple[tuple[str, str], ...] = (
    ("actor_rollout_ref", "its parts are model, engine, sampling, rollout and train"),
    ("trainer", "it is train, eval and trackers"),
    ("data", "it is tasks; lengths are sampling.max_tokens and episode.context"),
    ("logging_steps log_freq", "every step is logged"),
    (
        "batch_size train_batch_size per_device_train_batch_size rollout_batch_size",
        "a step has rollout.tasks_per_step tasks with rollout.group_size episodes each",
    ),
    (
        "micro_batch_size ppo_micro_batch_size gradient_accumulation_steps max_tokens_per_gpu",
        "train.max_tokens_per_microbatch says how many tokens are computed at once; gradients accumulate over the rest",
    ),
    (
        "learning_rate actor_learning_rate",
        "it is train.lr",
    ),
    (
        "num_generations n rollout_n group_size n_samples_per_prompt",
        "it is rollout.group_size",
    ),
    (
        "beta kl_coef kl_loss_coef init_kl_coef use_kl_loss kl_ctrl",
        "a KL penalty is one of regularizers, like regularizers = [{ kind = 'kl', coef = 0.01 }]",
    ),
    (
        "max_completion_length max_new_tokens max_response_length response_length",
        "it is sampling.max_tokens, of one turn; episode.tokens is of a whole episode",
    ),
    (
        "max_prompt_length max_length max_model_len",
        "it is episode.context",
    ),
    (
        "max_steps num_train_epochs total_epochs total_training_steps num_episodes",
        "it is train.steps",
    ),
    (
        "warmup_steps warmup_ratio lr_warmup_steps",
        "it is train.warmup, in optimiser steps",
    ),
    (
        "lr_scheduler_type lr_scheduler warmup_style",
        "it is train.schedule",
    ),
    (
        "max_grad_norm grad_clip gradient_clip",
        "it is train.clip",
    ),
    (
        "epsilon epsilon_high clip_ratio clip_ratio_high clip_ratio_low eps_clip",
        "it is loss.clip_low and loss.clip_high",
    ),
    (
        "adv_estimator advantage_estimator algorithm",
        "it is credit.kind",
    ),
    (
        "model_name_or_path model_path pretrain path name_or_path",
        "it is model.id",
    ),
    (
        "max_turns max_assistant_turns max_steps_per_episode",
        "it is episode.turns",
    ),
    (
        "gradient_checkpointing enable_gradient_checkpointing",
        "it is train.checkpointing",
    ),
    (
        "use_lora use_peft lora_r r lora_target_modules peft_config",
        "adapters are model.train = 'lora', with model.lora_rank and model.lora_alpha",
    ),
    (
        "bf16 fp16 torch_dtype precision",
        "it is model.dtype",
    ),
    (
        "save_steps save_freq save_interval",
        "it is train.checkpoint_every",
    ),
    (
        "eval_steps test_freq eval_freq",
        "it is eval.every",
    ),
    (
        "num_iterations ppo_epochs num_ppo_epochs",
        "it is train.epochs",
    ),
    (
        "ppo_mini_batch_size num_mini_batches mini_batch_size",
        "it is train.minibatches",
    ),
    (
        "report_to logger loggers wandb",
        "it is trackers, like trackers = ['jsonl', 'console']",
    ),
    (
        "output_dir run_name default_local_dir ckpt_path",
        "name it on the command line: --run, --out",
    ),
    (
        "reward_funcs reward_function reward_model",
        "it is rewards.terms",
    ),
    (
        "loss_type policy_loss",
        "it is loss.kind",
    ),
    (
        "use_vllm vllm_mode vllm_server_base_url",
        "sample from a server with engine.kind = 'openai'",
    ),
    (
        "gpu_memory_utilization vllm_gpu_memory_utilization",
        "it is engine.memory_mb",
    ),
    (
        "dataset dataset_name train_files train_file",
        "it is tasks.train",
    ),
    (
        "val_files eval_dataset",
        "it is tasks.heldout",
    ),
    (
        "reference_model ref_model ref",
        "losses that need one get the policy that RL began with; train.reference_every has it follow",
    ),
    (
        "optimizer optim",
        "it is AdamW, by train.lr, train.betas and train.weight_decay",
    ),
    (
        "coef",
        "it stands beside the kind of a loss: regularizers = [{ kind = 'kl', coef = 0.01 }], or rehearsal.loss.coef",
    ),
    (
        "critic",
        "it is a table of the credit that learns one: credit.critic, of gae, turn_gae, bilevel_gae, utterance_critic "
        "and progress_attribution",
    ),
    (
        "implicit",
        "it is credit.reward_model, a table of the credit implicit_step",
    ),
    (
        "feedback",
        "it is loss.feedback, a table of the loss self_distill",
    ),
    (
        "scale_rewards",
        "it is credit.scale",
    ),
)
"""Space-separated keys of other trainers, each with a hint to the counterpart here."""

ELSEWHERE = {name: text for names, text in _WORDS for name in names.split()}
"""Hints by key."""


def hint(word: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown key: its counterpart here if other trainers use it, else the nearest known key."""
    return ELSEWHERE[word] if word in ELSEWHERE else nearest(word, known)
