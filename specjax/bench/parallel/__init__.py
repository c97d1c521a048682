"""ParallelBench's tasks (Kang et al. 2025): how much a text suffers when its tokens are decoded in parallel.

The questions, their wordings and their data are our own; the answers are scored as ParallelBench scores them. A
question that has one right answer loses nothing if tokens are predicted independently of each other, and one that has
many does.
"""

from specjax.bench.parallel.base import Question as Question
from specjax.bench.parallel.base import Task as Task
from specjax.bench.parallel.lists import ASKED as ASKED
from specjax.bench.parallel.lists import ListTask as ListTask
from specjax.bench.parallel.measures import tools_of as tools_of
from specjax.bench.parallel.puzzles import LatinSquare as LatinSquare
from specjax.bench.parallel.puzzles import Sudoku as Sudoku
from specjax.bench.parallel.writing import Paraphrase as Paraphrase
from specjax.bench.parallel.writing import Summarize as Summarize
from specjax.bench.parallel.writing import WordsToSentence as WordsToSentence

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *map(ListTask, ASKED),
        LatinSquare(),
        Sudoku(),
        *map(WordsToSentence, ("easy", "medium", "hard")),
        Paraphrase(),
        Summarize(),
    )
}
"""Every task by its name, in the order of tables."""
SAMPLES = 100
