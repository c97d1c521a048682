"""Prompts go to the drafter or model that has paid best for prompts like them."""

from specjax.decode.routing.bandit import Router as Router
from specjax.decode.routing.method import Route as Route
