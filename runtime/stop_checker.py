"""Stop strings: found across token boundaries, and never shown in part before they are sure not to be one."""

from __future__ import annotations


class StopChecker:
    """Text of one completion as it grows.

        text:  |------ may be shown ------|-- may be the beginning of a stop string --|
               0                       visible                                    len(text)

    text: all text so far; cut at the match once there is one.
    """

    def __init__(self, stops: tuple[str, ...], *, include_in_output: bool = False) -> None:
        self._stops = stops
        self._include = include_in_output
        self._longest = max(map(len, stops), default=0)
        self._searchable = 0  # a match must not begin before it
        self.text = ""
        self.visible = 0

    def feed(self, new: str, *, search: bool = True) -> str | None:
        """Append text. Return the stop string whose match begins first (the longest, if several do), if any.

        Args:
            search: False while the completion is too short to stop: matches within this text do not count.
        """
        if not new:
            return None
        before = len(self.text)
        self.text += new
        if not self._stops:
            self.visible = len(self.text)
            return None
        if not search:
            self._searchable = self.visible = len(self.text)
            return None
        match = self._find(max(self._searchable, before - self._longest + 1))
        if match is not None:
            begin, stop = match
            self.text = self.text[: begin + len(stop) if self._include else begin]
            self.visible = len(self.text)
            return stop
        self.visible = len(self.text) - self._held()
        return None

    def end(self) -> None:
        """The completion ended otherwise: what was held back is no stop string."""
        self.visible = len(self.text)

    def _find(self, start: int) -> tuple[int, str] | None:
        found = [(self.text.find(stop, start), stop) for stop in self._stops]
        return min(((at, stop) for at, stop in found if at >= 0), key=lambda m: (m[0], -len(m[1])), default=None)

    def _held(self) -> int:
        """Return the length of the longest end of the text that begins a stop string."""
        for length in range(min(self._longest - 1, len(self.text) - self._searchable), 0, -1):
            end = self.text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
