"""Retrieval while decoding, plain and speculated (RaLMSpec, arXiv:2401.14021)."""

from specjax.search.ralm.method import Ralm as Ralm
from specjax.search.ralm.retrievers import Bm25 as Bm25
from specjax.search.ralm.retrievers import Dense as Dense
from specjax.search.ralm.retrievers import Faiss as Faiss
from specjax.search.ralm.retrievers import Ranks as Ranks
from specjax.search.ralm.retrievers import Retriever as Retriever
from specjax.search.ralm.rows import Retrieved as Retrieved
from specjax.search.ralm.strides import best_ahead as best_ahead
from specjax.search.ralm.strides import match_rate as match_rate
from specjax.search.ralm.strides import round_seconds as round_seconds
