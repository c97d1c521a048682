"""Rollouts for reinforcement learning: samples of prompts in one program, their log-probabilities, and new parameters."""

from specjax.rollouts.placing import reshard
from specjax.rollouts.samples import LOGPROBS, Completions, Rollout, rollout
from specjax.rollouts.scores import token_logprobs

__all__ = ["LOGPROBS", "Completions", "Rollout", "reshard", "rollout", "token_logprobs"]
