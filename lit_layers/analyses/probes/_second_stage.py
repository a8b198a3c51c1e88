"""The second stage of an analysis that needs two: what starts when all parts of the first are done. Not for recipes."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lit_layers.analyses.base import Analysis, DividedAnalysis
from lit_layers.models.view import LayeredModel
from lit_layers.records import Record


class FollowingAnalysis(DividedAnalysis):
    """What follows on the parts of an analysis: further parts, such as its layers; their records are the analysis's."""

    def __init__(
        self,
        analysis: Analysis,
        parts: Sequence[Any],
        of_part: Callable[[Any], Any],
        records: Callable[[list[Any]], Iterable[Record]],
    ) -> None:
        self.analysis, self.name = analysis, analysis.name
        self._parts, self._of_part, self._records = parts, of_part, records

    def parts(self, model: LayeredModel) -> Sequence[Any]:
        return self._parts

    def of_part(self, model: LayeredModel, part: Any) -> Any:
        return self._of_part(part)

    def combine(self, model: LayeredModel, results: list[Any]) -> Iterable[Record]:
        return self._records(results)

    def check_options(self, model: LayeredModel) -> None:
        """The analysis has been checked."""

    def config_hash(self) -> str:
        return self.analysis.config_hash()

    def data_hash(self) -> str | None:
        return self.analysis.data_hash()

    def tokenizer_hash(self) -> str | None:
        return self.analysis.tokenizer_hash()
