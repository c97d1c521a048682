"""Verifiable tasks: questions by seed with reference answers and exact checkers, split by meaning into training and
held-out."""

from specjax.tasks.base import LEVELS as LEVELS
from specjax.tasks.base import Family as Family
from specjax.tasks.base import Question as Question
from specjax.tasks.base import Rng as Rng
from specjax.tasks.chat import CHAT_TEMPLATE as CHAT_TEMPLATE
from specjax.tasks.chat import TURN_TOKENS as TURN_TOKENS
from specjax.tasks.chat import messages as messages
from specjax.tasks.generate import FAMILIES as FAMILIES
from specjax.tasks.generate import SPLITS as SPLITS
from specjax.tasks.generate import Mixture as Mixture
from specjax.tasks.generate import check as check
from specjax.tasks.generate import generate as generate
