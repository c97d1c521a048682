"""The list of everything trainable: models, and the methods that packages export with an objective."""

import functools

from specjax import diffusion, draft, verify
from specjax.about import abouts, exported
from specjax.diffusion import unmask
from specjax.draft.adaptive import Rule
from specjax.draft.base import Trained
from specjax.objectives.joint import Joint
from specjax.train.joint import joint_task
from specjax.train.methods import HeadTask, policy_task, rule_task, verifier_task
from specjax.train.task import Making
from specjax.train.whole_models import WHOLE_MODELS
from specjax.verify import Verifier


def trainable() -> dict[str, Making]:
    """Everything that `specjax train` can train, by name. A method has the first of its names, like its folder."""
    own = heads()
    found = WHOLE_MODELS | {"joint": Making(Joint, functools.partial(joint_task, own))}
    found |= {name: Making(head.objective, head) for name, head in own.items()}
    methods = (
        (Rule, (draft,), rule_task),
        (unmask.Unmask, (diffusion, unmask), policy_task),
        (Verifier, (verify,), verifier_task),
    )
    for base, packages, task in methods:
        for kind in exported(base, *packages):
            if (objective := kind.objective()) is not None:
                name = abouts(kind)[0].name
                found[name] = Making(objective, functools.partial(task, name, kind, objective))
    return found


def heads() -> dict[str, HeadTask]:
    """The trainable heads over the target's features."""
    found = {abouts(kind)[0].name: kind for kind in exported(Trained, draft)}
    made = {name: (kind, kind.objective()) for name, kind in found.items()}
    return {name: HeadTask(name, kind, objective) for name, (kind, objective) in made.items() if objective is not None}
