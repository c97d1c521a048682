"""The list of what can be trained: models, and the methods that packages export with an objective."""

import functools

from specjax import diffusion, draft
from specjax.about import abouts, exported
from specjax.diffusion import unmask
from specjax.draft.adaptive import Rule
from specjax.draft.base import Trained
from specjax.train.methods import HeadTask, policy_task, rule_task
from specjax.train.task import Make
from specjax.train.whole_models import WHOLE_MODELS


def trainable() -> dict[str, Make]:
    """Everything that `specjax train` has by name. A method goes by the first of its names, as its folder does."""
    found: dict[str, Make] = {**WHOLE_MODELS, **heads()}
    for base, packages, task in ((Rule, (draft,), rule_task), (unmask.Unmask, (diffusion, unmask), policy_task)):
        for kind in exported(base, *packages):
            if (objective := kind.objective()) is not None:
                name = abouts(kind)[0].name
                found[name] = functools.partial(task, name, kind, objective)
    return found


def heads() -> dict[str, HeadTask]:
    """The heads over the target's features among them."""
    found = {abouts(kind)[0].name: kind for kind in exported(Trained, draft)}
    made = {name: (kind, kind.objective()) for name, kind in found.items()}
    return {name: HeadTask(name, kind, objective) for name, (kind, objective) in made.items() if objective is not None}
