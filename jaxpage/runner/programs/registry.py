"""All kinds of programs. One more is one new file, and its name here."""

from typing import Any

from jaxpage.runner.programs.admit import ADMIT
from jaxpage.runner.programs.edit import EDIT
from jaxpage.runner.programs.empty import EMPTY
from jaxpage.runner.programs.fork import FORK
from jaxpage.runner.programs.pool import POOL
from jaxpage.runner.programs.program import Program
from jaxpage.runner.programs.propose import PROPOSE
from jaxpage.runner.programs.rules import RULES
from jaxpage.runner.programs.sample import SAMPLE
from jaxpage.runner.programs.score import SCORE, SCORE_ROWS
from jaxpage.runner.programs.step import STEP

# In this order those of the same time are compiled, the first before all others, and run when they are rehearsed.
PROGRAMS: dict[str, Program[Any]] = {
    program.name: program
    for program in (STEP, SAMPLE, PROPOSE, ADMIT, EDIT, FORK, RULES, SCORE, SCORE_ROWS, POOL, EMPTY)
}
