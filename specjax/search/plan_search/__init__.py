"""Programs from plans that differ: search over observations about a problem (PlanSearch, arXiv:2409.03733)."""

from specjax.search.plan_search.method import Planned as Planned
from specjax.search.plan_search.method import PlanSearch as PlanSearch
