"""Integer expressions over a kernel's variables: where in a tensor an element lies.

    Index = const + Σ coefficient · atom        atom = Var | Quotient(Index, n) | Remainder(Index, n)

Bounds are known, so that taking an index apart again (`divide`) is exact where it can be: with 0 <= c < 128,

    (row·4096 + h·128 + c) / 128  =  row·32 + h, rest c

and views compose to plain sums. Equal expressions are equal objects: they key the generator's caches.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

NO_AXES: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Var:
    """A variable of the kernel with 0 <= value < extent; its name is its source text.

    extent: None when it is not known at build time (rows).
    axes: axes of the kernel's block [heads, channels] along which it varies; none for a scalar.
    masks: conditions under which the value is meaningful, as source text; no access is made where one fails.
    """

    name: str
    extent: int | None = None
    axes: frozenset[int] = NO_AXES
    masks: tuple[str, ...] = ()

    @property
    def low(self) -> int:
        return 0

    @property
    def high(self) -> int | None:
        return None if self.extent is None else self.extent - 1

    @property
    def variables(self) -> tuple[Var, ...]:
        return (self,)


@dataclass(frozen=True)
class Quotient:
    """of // by, for of >= 0."""

    of: Index
    by: int

    @property
    def name(self) -> str:
        return f"({self.of.grouped} // {self.by})"

    @property
    def low(self) -> int:
        return 0

    @property
    def high(self) -> int | None:
        return None if self.of.high is None else self.of.high // self.by

    @property
    def variables(self) -> tuple[Var, ...]:
        return self.of.variables


@dataclass(frozen=True)
class Remainder:
    """of % by, for of >= 0."""

    of: Index
    by: int

    @property
    def name(self) -> str:
        return f"({self.of.grouped} % {self.by})"

    @property
    def low(self) -> int:
        return 0

    @property
    def high(self) -> int | None:
        return self.by - 1 if self.of.high is None else min(self.by - 1, self.of.high)

    @property
    def variables(self) -> tuple[Var, ...]:
        return self.of.variables


Atom = Var | Quotient | Remainder


@dataclass(frozen=True)
class Index:
    """See the module. `terms` are sorted and without zeros: build with `index_of`, `+` and `*`."""

    terms: tuple[tuple[Atom, int], ...] = ()
    const: int = 0

    def __add__(self, other: Index | int) -> Index:
        if isinstance(other, int):
            return Index(self.terms, self.const + other)
        return collect((*self.terms, *other.terms), self.const + other.const)

    def __mul__(self, factor: int) -> Index:
        return collect([(atom, coefficient * factor) for atom, coefficient in self.terms], self.const * factor)

    @property
    def constant(self) -> int | None:
        """The value when it is known at build time."""
        return None if self.terms else self.const

    @cached_property
    def low(self) -> int | None:
        """The least possible value; None: unknown."""
        return self._bound(-1)

    @cached_property
    def high(self) -> int | None:
        """The greatest possible value; None: unknown."""
        return self._bound(1)

    def _bound(self, sign: int) -> int | None:
        total = self.const
        for atom, coefficient in self.terms:
            extreme = atom.high if coefficient * sign > 0 else atom.low
            if extreme is None:
                return None
            total += coefficient * extreme
        return total

    @cached_property
    def variables(self) -> tuple[Var, ...]:
        """The variables that it depends on, each once, in order."""
        return tuple(dict.fromkeys(var for atom, _ in self.terms for var in atom.variables))

    @cached_property
    def axes(self) -> frozenset[int]:
        """Axes of the block along which it varies."""
        return frozenset().union(*(var.axes for var in self.variables))

    @cached_property
    def masks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(mask for var in self.variables for mask in var.masks))

    @property
    def grouped(self) -> str:
        """The expression as source text that can be an operand."""
        single = len(self.terms) == 1 and self.const == 0 and self.terms[0][1] == 1
        return self.text if single or not self.terms else f"({self.text})"

    @cached_property
    def text(self) -> str:
        """The expression as source text; see `grouped`."""
        text = ""
        for atom, coefficient in self.terms:
            factor = abs(coefficient)
            term = atom.name if factor == 1 else f"{atom.name} * {factor}"
            sign = "-" if coefficient < 0 else "+"
            text += f" {sign} {term}" if text else (f"-{term}" if coefficient < 0 else term)
        if self.const and text:
            return f"{text} {'-' if self.const < 0 else '+'} {abs(self.const)}"
        return text or str(self.const)

    def divide(self, by: int) -> tuple[Index, Index]:
        """Return (quotient, remainder) of the division by a positive number; the index must not be negative."""
        if by == 1:
            return self, Index()
        quotient, const = builtins.divmod(self.const, by)
        whole = collect([(atom, c // by) for atom, c in self.terms if c % by == 0], quotient)
        rest = collect([(atom, c) for atom, c in self.terms if c % by], const)
        if rest.low is None or rest.low < 0:  # such as 127 - c: only the whole is known not to be negative
            whole, rest, const = Index(), self, self.const
        if rest.low is not None and rest.low >= 0 and rest.high is not None and rest.high < by:
            return whole, rest
        # What all coefficients share divides out: (g·e + r) / (g·n) = e / n, rest g·(e % n) + r, for r < g.
        shared = math.gcd(by, *(coefficient for _, coefficient in rest.terms))
        inner = collect([(atom, c // shared) for atom, c in rest.terms], const // shared)
        if shared == by:
            return whole + inner, Index((), const % shared)
        return whole + quotient_of(inner, by // shared), remainder_of(inner, by // shared) * shared + const % shared


def index_of(atom: Atom | int) -> Index:
    """Return a number or an atom as an index. A variable that can only be 0 is the number 0."""
    if isinstance(atom, int):
        return Index((), atom)
    return Index() if atom.high == 0 else Index(((atom, 1),))


def quotient_of(index: Index, by: int) -> Index:
    if len(index.terms) == 1 and index.const == 0:
        atom, coefficient = index.terms[0]
        if coefficient == 1 and isinstance(atom, Quotient):  # x // a // b = x // (a·b)
            return index_of(Quotient(atom.of, atom.by * by))
    return index_of(Quotient(index, by))


def remainder_of(index: Index, by: int) -> Index:
    if len(index.terms) == 1 and index.const == 0:
        atom, coefficient = index.terms[0]
        if coefficient == 1 and isinstance(atom, Remainder) and atom.by % by == 0:  # x % a % b = x % b where b | a
            return remainder_of(atom.of, by)
    return index_of(Remainder(index, by))


def collect(terms: Iterable[tuple[Atom, int]], const: int) -> Index:
    """Add up equal atoms; put quotients and remainders of one division together again."""
    found: dict[Atom, int] = {}
    for atom, coefficient in terms:
        found[atom] = found.get(atom, 0) + coefficient
    for atom in list(found):
        if not isinstance(atom, Quotient) or atom not in found:
            continue
        rest = Remainder(atom.of, atom.by)  # n·(x // n) + x % n = x
        times = found.get(rest, 0)
        if times and found[atom] == times * atom.by:
            del found[atom], found[rest]
            whole = atom.of * times
            return collect((*found.items(), *whole.terms), const + whole.const)
    kept = [(atom, coefficient) for atom, coefficient in found.items() if coefficient]
    return Index(tuple(sorted(kept, key=lambda term: (-abs(term[1]), term[0].name))), const)
