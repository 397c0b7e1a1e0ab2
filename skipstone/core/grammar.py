"""What the engine needs of a grammar that constrains one request's text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # requests must be importable without torch: `--help` has to be quick
    from torch import Tensor

    from skipstone.core.request import SamplingParams


class Grammar(Protocol):
    """The state of a grammar after the request's committed tokens. Questions about further tokens leave it as it is."""

    def allowed(self, further: list[int]) -> Tensor | None:
        """Which tokens may follow `further`, [V] bool; None when `further` itself leaves the grammar."""

    def legal(self, further: list[int]) -> int:
        """How many of these tokens, from the first on, stay within the grammar."""

    def advance(self, token: int) -> bool:
        """Take over a committed token. False when the grammar forbids it."""

    @property
    def failure(self) -> str | None:
        """Why nothing may follow any longer, where that is no matter of the text: a limit that was reached."""

    @property
    def ended(self) -> bool:
        """Whether the text is complete and nothing may follow."""


class GrammarMaker(Protocol):
    """Makes grammars for one vocabulary, from any thread. Raises RequestError for one that cannot be used."""

    def compile(self, params: SamplingParams) -> Grammar | None:
        """The grammar that the parameters ask for, if any."""

    def prepare(self, params: SamplingParams, make: bool = True) -> object | None:
        """What `compile` copies, not made anew while somebody has it. Without `make`: None if it is not there."""
