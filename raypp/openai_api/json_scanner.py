"""Where a JSON object ends, as its text comes."""

from __future__ import annotations


class JsonScanner:
    """Counts braces outside of strings."""

    def __init__(self) -> None:
        self.is_begun = False
        self.is_complete = False
        self.control_chars: list[int] = []
        """Where in the text that was read last there are control characters inside of strings: JSON has none there."""
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def feed(self, text: str, start: int = 0, *, stop: str = "") -> int:
        """Read on; return where in the text the object ends, which begins with the first character ever.

        Args:
            text: What comes next.
            start: Where in it.
            stop: A character before which to leave off, outside of strings; empty: none is.
        """
        self.control_chars.clear()
        for index in range(start, len(text)):
            char = text[index]
            if self.is_complete:
                return index
            if self._is_in_string:
                if char < " ":
                    self.control_chars.append(index)
                self._read_in_string(char)
            elif char == '"':
                self._is_in_string = True
            elif char in "{[":
                self._depth += 1
                self.is_begun = True
            elif char in "}]":
                self._depth -= 1
                self.is_complete = self._depth == 0
            elif char == stop:
                return index
        return len(text)

    def _read_in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_in_string = False
