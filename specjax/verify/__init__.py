"""Verifiers: which drafted tokens are kept, and which token follows them.

One line per method, in the order in which they are listed.
"""
# isort: skip_file

from specjax.verify.coupled import Coupled as Coupled
from specjax.verify.rejection import Rejection as Rejection
from specjax.verify.block import Block as Block
from specjax.verify.multi_step import MultiStep as MultiStep
from specjax.verify.recursive import Recursive as Recursive
from specjax.verify.recursive_wor import RecursiveWOR as RecursiveWOR
from specjax.verify.k_seq import KSeq as KSeq
from specjax.verify.optimal import Optimal as Optimal
from specjax.verify.greedy_multi import GreedyMulti as GreedyMulti
from specjax.verify.traversal import Traversal as Traversal
from specjax.verify.best import Best as Best
from specjax.verify.typical import Typical as Typical
from specjax.verify.fly import Fly as Fly
from specjax.verify.gad_plus import GadPlus as GadPlus
from specjax.verify.ears import Ears as Ears
from specjax.verify.lenient import Lenient as Lenient
from specjax.verify.lantern import Lantern as Lantern
from specjax.verify.judge import Judge as Judge
from specjax.verify.kl_judge import KLJudge as KLJudge
from specjax.verify.rapid import RapidTransfer as RapidTransfer
from specjax.verify.reflective import Reflective as Reflective
from specjax.verify.reverse import Reverse as Reverse

# the contract
from specjax.verify.base import Verifier as Verifier
from specjax.verify.base import Verdict as Verdict
