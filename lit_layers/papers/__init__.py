"""Published figures and tables as recipes: the commands that measure them again, and the printed numbers beside."""

from lit_layers.papers.comparison import Row, compare, write_comparison
from lit_layers.papers.recipe import PAPERS, PaperRecipe, Place, Published, Step, read_recipe

__all__ = ["PAPERS", "PaperRecipe", "Place", "Published", "Row", "Step", "compare", "read_recipe", "write_comparison"]
