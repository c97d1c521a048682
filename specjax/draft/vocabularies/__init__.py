"""Draft models whose tokens are others than the target's (arXiv:2502.05202, arXiv:2507.02659)."""

from specjax.draft.vocabularies.omnidraft import OmniDraft as OmniDraft
from specjax.draft.vocabularies.shared import SharedLM as SharedLM
from specjax.draft.vocabularies.slem import Slem as Slem
from specjax.draft.vocabularies.tli import Tli as Tli
