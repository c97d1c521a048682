"""An objective of every kind on a tiny target, and rows that hold several documents."""

import functools

import numpy as np
from support import small_training as tiny

from specjax.draft import (
    MTP,
    PPD,
    Chimera,
    Clover,
    Clover2,
    DFlash,
    DFlash2,
    Domino,
    Dovetail,
    DSpark,
    Eagle,
    Eagle3,
    Falcon,
    Fspad,
    Gemma4Assistant,
    Griffin,
    Gumiho,
    HiddenTransfer,
    Hydra,
    Kangaroo,
    LongSpec,
    LSTMSpeculator,
    Medusa,
    MLPSpeculator,
    PEagle,
)
from specjax.draft.acceptance import Acceptance
from specjax.draft.acceptance.objective import TrainAcceptance
from specjax.draft.chimera.objective import TrainChimera
from specjax.draft.clover.objective import TrainClover
from specjax.draft.clover2.objective import TrainClover2
from specjax.draft.dflash.objective import TrainDFlash
from specjax.draft.dflash2.objective import TrainDFlash2
from specjax.draft.domino.objective import TrainDomino
from specjax.draft.dovetail.objective import TrainDovetail
from specjax.draft.dspark.objective import TrainDSpark
from specjax.draft.eagle.objective import TrainEagle
from specjax.draft.eagle3.objective import TrainEagle3
from specjax.draft.falcon.objective import TrainFalcon
from specjax.draft.gemma4_assistant.objective import TrainGemma4Assistant
from specjax.draft.griffin.objective import TrainGriffin
from specjax.draft.gumiho.objective import TrainGumiho
from specjax.draft.hidden_transfer.objective import TrainHiddenTransfer
from specjax.draft.hydra.objective import TrainHydra
from specjax.draft.kangaroo.objective import TrainKangaroo
from specjax.draft.longspec.objective import TrainLongSpec
from specjax.draft.medusa.objective import TrainMedusa
from specjax.draft.mtp.objective import TrainMTP
from specjax.draft.peagle.objective import TrainPEagle
from specjax.draft.ppd.objective import TrainPPD
from specjax.draft.s2d.objective import TrainS2D
from specjax.draft.speculator.objective import TrainLSTMSpeculator, TrainMLPSpeculator
from specjax.expand import Chain
from specjax.objectives.base import Batch
from specjax.objectives.joint import Joint
from specjax.objectives.next_token import NextToken
from specjax.objectives.sparsity import Sparsity
from specjax.train.distill import Distill

SIZES = (6, 5), (8, 6)
"""Of the documents in each row of 14."""
FIXED = {
    "medusa": TrainMedusa(Medusa(Chain(2), heads=2).bind(tiny.TARGET)),
    "hydra": TrainHydra(Hydra(Chain(2), heads=2, prefix_layer=True).bind(tiny.TARGET)),
    "mlp_speculator": TrainMLPSpeculator(MLPSpeculator(heads=3, tied=False).bind(tiny.TARGET)),
    "lstm_speculator": TrainLSTMSpeculator(LSTMSpeculator(heads=3, inner=20).bind(tiny.TARGET)),
    "clover": TrainClover(Clover(Chain(2), heads=2).bind(tiny.TARGET)),
    "chimera": TrainChimera(Chimera(Chain(2), heads=2).bind(tiny.TARGET)),
    "clover2": TrainClover2(Clover2(Chain(2), layers=1).bind(tiny.TARGET), heads=2),
    "eagle1": TrainEagle(Eagle().bind(tiny.TARGET), noise=0.0),
    "eagle3": TrainEagle3(Eagle3().bind(tiny.TARGET), unroll=3),
    "falcon": TrainFalcon(Falcon(carries=True).bind(tiny.TARGET), noise=0.0, glance=0.0),
    "fspad": TrainEagle(Fspad().bind(tiny.TARGET), noise=0.0, unroll=2),
    "griffin": TrainGriffin(Griffin().bind(tiny.TARGET), noise=0.0, **TrainGriffin.presets["stage2"]),
    "dovetail": TrainDovetail(Dovetail(layers=2).bind(tiny.TARGET), noise=0.0),
    "gumiho": TrainGumiho(Gumiho(mlps=2).bind(tiny.TARGET), noise=0.0),
    "peagle": TrainPEagle(PEagle(Chain(2)).bind(tiny.TARGET), unroll=3),
    "mtp": TrainMTP(MTP().bind(tiny.TARGET), unroll=2),
    "gemma4_assistant": TrainGemma4Assistant(Gemma4Assistant().bind(tiny.TARGET), unroll=2),
    "longspec": TrainLongSpec(LongSpec(window=4).bind(tiny.TARGET), reach=0, lag=1),
    "kangaroo": TrainKangaroo(Kangaroo(exit_layer=1).bind(tiny.TARGET)),
    "distill": Distill(tiny.TARGET, tiny.DRAFT),
    "lm": NextToken(tiny.DRAFT),
    "lm_sparsity": NextToken(tiny.BLOCKS, Sparsity(0.3, 4, 0.7)),
    "s2d": TrainS2D(tiny.TARGET, (1, 2)),
    "joint": Joint(TrainMedusa(Medusa(Chain(2), heads=2).bind(tiny.TARGET)), rank=2),
}
DRAWN = {
    "dflash": TrainDFlash(DFlash(block=4, layers=1).bind(tiny.TARGET), anchors=6),
    "dflash2": TrainDFlash2(DFlash2(block=4, group=4, rank=4).bind(tiny.TARGET), anchors=6),
    "dspark": TrainDSpark(DSpark(block=3, rank=4).bind(tiny.TARGET), anchors=6),
    "domino": TrainDomino(Domino(block=3, state=6, rank=4).bind(tiny.TARGET), anchors=6),
    "ppd": TrainPPD(PPD("2 @ 1x3; 1 @ 1x2").bind(tiny.TARGET), cuts=6),
    "hidden_transfer": TrainHiddenTransfer(HiddenTransfer(layers=(1, 1)).bind(tiny.TARGET), cuts=6),
    "acceptance": TrainAcceptance(tiny.TARGET, tiny.DRAFT, Acceptance(layers=1)),
}
"""Objectives that draw places or tokens by slot."""


@functools.cache
def packed() -> Batch:
    """Every document's first two tokens are a prompt, but the second one's, which is text."""
    tokens = np.zeros((2, 14), np.int32)
    mask = np.zeros((2, 14), bool)
    documents = np.full((2, 14), 2, np.int32)
    rng = np.random.default_rng(0)
    for row, sizes in enumerate(SIZES):
        for number, size in enumerate(sizes):
            begin = sum(sizes[:number])
            tokens[row, begin : begin + size] = rng.integers(1, 32, size)
            mask[row, begin + (0 if (row, number) == (0, 1) else 2) : begin + size] = True
            documents[row, begin : begin + size] = number
    return Batch(tokens, mask, documents)


def alone() -> Batch:
    """The same documents in rows of their own."""
    tokens, mask = np.zeros((4, 14), np.int32), np.zeros((4, 14), bool)
    for row in range(2):
        for number, size in enumerate(SIZES[row]):
            begin = sum(SIZES[row][:number])
            tokens[2 * row + number, :size] = packed().tokens[row, begin : begin + size]
            mask[2 * row + number, :size] = packed().mask[row, begin : begin + size]
    return Batch(tokens, mask)


def frozen(name):
    return (tiny.target_params(), tiny.draft_params()) if name == "acceptance" else tiny.target_params()
