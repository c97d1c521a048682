"""Families of tasks: a line per family, in the order in which they are listed."""
# isort: skip_file

from specjax.tasks.families.math import Math as Math
from specjax.tasks.families.json import Json as Json
from specjax.tasks.families.code import Code as Code
from specjax.tasks.families.edit import Edit as Edit
from specjax.tasks.families.qa import Qa as Qa
from specjax.tasks.families.retrieve import Retrieve as Retrieve
from specjax.tasks.families.lists import Lists as Lists
from specjax.tasks.families.translate import Translate as Translate
from specjax.tasks.families.fill import Fill as Fill
from specjax.tasks.families.judge import Judge as Judge
