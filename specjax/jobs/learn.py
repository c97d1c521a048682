"""`specjax generate --learn FOLDER`: a job's draft model learns from the target's corrections (arXiv:2310.07177,
arXiv:2507.02659)."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax import models
from specjax.about import abouts
from specjax.assembly.companions import Ruled, Stored, of_shared, other_draft
from specjax.assembly.line import parts
from specjax.assembly.registry import DRAFTERS, build_drafter, build_verifier, parse
from specjax.decode import Speculate
from specjax.draft import Drafter, OmniDraft
from specjax.draft.heads.folder import save_head
from specjax.jobs.options import JobOptions
from specjax.models import LlamaLM
from specjax.serve.online import OnlineEngine
from specjax.serve.students import learns

MOST_DOMAINS = 32
"""Each has its own draft model and optimizer in memory."""
LEARNT = "learnt.safetensors"
"""The file of a folder with what learning needs to go on; the draft model is beside it."""
HEAD = "acceptance.head"
"""The folder of a head that ends drafts, within a folder; no domain has a dot in its name."""


@dataclasses.dataclass
class Lessons:
    """What the draft of a domain has learnt, while another one's drafts: the state of an `OnlineEngine`."""

    draft_params: Any
    moments: Any
    buffer: list[Any]
    losses: list[float]


class LearningEngine(OnlineEngine):
    """An `OnlineEngine` that keeps what its draft learns in a folder, after every update.

    Requests with a `domain` have a draft of their own, in a folder of that name within the folder. All drafts begin as the
    same one. A killed job loses the lessons of at most `interval` texts of each, and those that ran; no text depends on
    them.

    Args:
      folder: see below.
      model: as for `Engine`.
      draft: the draft model as it was loaded, for its tokenizer and its other files.
      drafter: the drafter and its parameters.
      options: of `OnlineEngine`.

    Attributes:
      folder: where; after `keep` it is a model that `draft:model=FOLDER` takes (or `omnidraft:model=FOLDER`, if its tokens
        are others than the target's), and so is each domain's.
      domain: whose draft drafts and learns.
      domains: of the job's texts, as `prepare` was told.
    """

    def __init__(self, folder: Path, model: Any, draft: Any, drafter: tuple[Drafter, Any], **options: Any):
        super().__init__(model, drafter, **options)
        self.folder, self._draft = folder, draft
        self.domain: str | None = None
        self.domains: tuple[str | None, ...] = (None,)
        self._first = self.draft_params, jax.tree.map(jnp.copy, self._moments)
        self._others: dict[str | None, Lessons] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._resume()

    def prepare(self, domains: Iterable[str | None]) -> None:
        """Reads what the drafts of these domains have learnt, before any text is written.

        Raises:
          ValueError: if there are too many, or a folder holds another model or has learnt for another draft.
        """
        self.domains = tuple(domains)
        named = [domain for domain in self.domains if domain is not None]
        if len(named) > MOST_DOMAINS:
            raise ValueError(
                f"--learn keeps a draft for each of at most {MOST_DOMAINS} domains, and these lines have {len(named)}: "
                "name kinds of texts, not texts"
            )
        for domain in named:
            check_folder(self.folder / domain)
        for domain in self.domains:
            self.choose(domain)

    def choose(self, domain: str | None) -> None:
        """From now on the draft of this domain drafts and learns."""
        if domain == self.domain:
            return
        self._others[self.domain] = Lessons(self.draft_params, self._moments, self._buffer, self.losses)
        self.domain = domain
        known = domain in self._others
        # an update donates the optimizer's state, so each draft has its own
        params, moments = self._first[0], jax.tree.map(jnp.copy, self._first[1])
        own = self._others.pop(domain) if known else Lessons(params, moments, [], [])
        self.draft_params, self._moments = own.draft_params, own.moments
        self._buffer, self.losses = own.buffer, own.losses
        if not known:
            self._resume()
        self._publish()

    @property
    def _own_folder(self) -> Path:
        return self.folder / (self.domain or "")

    def _resume(self) -> None:
        if (file := self._own_folder / LEARNT).exists():
            self.resume(file)

    def _learn(self, texts: dict[str, np.ndarray]) -> None:
        super()._learn(texts)
        self._save()

    def _save(self) -> None:
        self._own_folder.mkdir(exist_ok=True)
        self.save(self._own_folder / LEARNT)

    def keep(self) -> None:
        """Writes what was learnt, and the draft models in their own type."""
        for domain in self.domains:
            self.choose(domain)
            self._save()
            draft, own = self._draft, self.student.model(self.draft_params)
            models.save(
                self._own_folder, draft.lm, own, draft.dtype_name, draft.tokenizer, draft.eos_ids, draft.dual,
                generation=draft.generation,
            )  # fmt: skip
            if (head := self.student.head(self.draft_params)) is not None:
                self._keep(head)

    def _keep(self, head: Any) -> None:
        """Writes the head that ends drafts, for the draft model beside it."""
        ruled: Any = self.decoder.drafter
        own = dataclasses.replace(
            self.model, lm=ruled.drafter.lm, params=self.params["draft"]["drafter"], name="the draft model"
        )
        save_head(self._own_folder / HEAD, abouts(type(ruled.rule))[0].name, {"layers": ruled.rule.layers}, head, own)


def check_learns(options: JobOptions) -> None:
    """Raises ValueError if the options of a job with `learn` name no draft model, or several processes."""
    if options.ray is not None or options.distributed or options.coordinator is not None:
        raise ValueError("--learn is for a job of one process: leave --ray, --distributed and --coordinator out")
    way = options.way
    if not isinstance(way, Speculate) or not isinstance(way.drafter, str):
        raise ValueError(
            "--learn teaches a draft model: name it, such as --drafter draft or --drafter draft:model=FOLDER"
        )


def check_folder(folder: Path) -> None:
    """Raises ValueError if what a draft learns cannot be kept in a folder."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--learn: {str(folder)!r} is a file: name a folder")
    if (folder / "config.json").exists() and not (folder / LEARNT).exists():
        raise ValueError(f"--learn: {str(folder)!r} holds a model that would be replaced: name another folder")


def learning_engine(options: JobOptions, model: Any, **how: Any) -> LearningEngine:
    """The engine of a job with `learn`.

    Args:
      options: of the job.
      model: the loaded target.
      **how: options of `Engine`.

    Raises:
      ValueError: if its drafter is no draft model that learns, the verifier's text depends on drafts, or the folder holds
        another model or has learnt for another draft.
    """
    way, folder = options.way, Path(options.learn or "")
    assert isinstance(way, Speculate) and isinstance(way.drafter, str)
    check_folder(folder)
    verifier, _ = build_verifier(way.verifier, model)
    if verifier.text_follows_draft:
        raise ValueError(
            "--learn keeps the text only where it does not depend on the draft: leave the verifier out, or choose coupled"
        )
    draft, drafter = _draft_of(way.drafter, model, how.get("mesh"))
    draft = dataclasses.replace(draft, name=folder.name)
    return LearningEngine(folder, model, draft, drafter, decode=way, **how)


def _draft_of(line: str, model: Any, mesh: Any) -> tuple[Any, tuple[Drafter, Any]]:
    """The draft model that a drafter's line names, and the drafter with its parameters.

    Raises:
      ValueError: if it is none that learns, or cannot be loaded.
    """
    asked = parse("drafter", DRAFTERS, line) if len(parts(line)) == 1 else None
    inner = asked.drafter if isinstance(asked, Ruled) else asked
    if isinstance(inner, Stored) and inner.kind is OmniDraft:
        draft = other_draft(inner, model, mesh)
        drafter = of_shared(OmniDraft, inner, draft, model, mesh)
        if isinstance(asked, Ruled):
            drafter = asked.over(*drafter, model, mesh, fresh=True)
    else:
        drafter = build_drafter(line, model, mesh=mesh)
        draft = dataclasses.replace(model, lm=getattr(drafter[0], "lm", None), params=drafter[1], generation={})
    if not learns(drafter[0]) or not isinstance(draft.lm, LlamaLM):
        raise ValueError(
            f"--learn teaches a draft model, and {line!r} is none that learns: give --drafter draft:model=FOLDER, or "
            "omnidraft:model=FOLDER for a model of another vocabulary, which may also have rule=acceptance"
        )
    kind = np.dtype(jax.tree.leaves(draft.params)[0].dtype)
    return dataclasses.replace(draft, dtype=kind), drafter
