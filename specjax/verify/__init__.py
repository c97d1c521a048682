"""Verifiers: which of the drafted tokens are kept, and what follows them.

A line a method, in the order in which they are listed.
"""
# isort: skip_file

from specjax.verify.coupled import Coupled as Coupled
from specjax.verify.rejection import Rejection as Rejection
from specjax.verify.block import Block as Block

# the contract
from specjax.verify.base import Verifier as Verifier
from specjax.verify.base import Verdict as Verdict
