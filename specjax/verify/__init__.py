"""Verifiers: which of the drafted tokens are kept, and what follows them."""

from specjax.verify.base import Verdict, Verifier
from specjax.verify.coupled import Coupled
from specjax.verify.rejection import Rejection

__all__ = ["Coupled", "Rejection", "Verdict", "Verifier"]
