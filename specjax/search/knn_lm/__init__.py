"""Next tokens from nearest hidden states (kNN-LM, arXiv:1911.00172), with neighbours that are guessed (arXiv:2401.14021)."""

from specjax.search.knn_lm.method import KnnLm as KnnLm
from specjax.search.knn_lm.method import KnnWritten as KnnWritten
from specjax.search.knn_lm.store import Entries as Entries
from specjax.search.knn_lm.store import build_entries as build_entries
