"""A program on a real pseudo-terminal, and what a person would see of it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

CONTROL = re.compile(r"\x1b\[(\??[\d;]*)([A-Za-z])")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a program ended, and all that it wrote; `restored`: the terminal's own settings are what they were."""

    code: int
    written: str
    restored: bool

    @property
    def seen(self) -> list[str]:
        return lines(self.written)

    @property
    def hides_the_cursor(self) -> bool:
        """Whether the cursor is hidden."""
        found = [command for command in CONTROL.findall(self.written) if command[0] == "?25"]
        return bool(found) and found[-1][1] == "l"


def on_terminal(
    command: list[str],
    *,
    columns: int = 100,
    rows: int = 40,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    when: Callable[[str, subprocess.Popen[bytes]], None] = lambda written, process: None,
) -> Ended:
    """Runs it to its end; `when` is given all that it has written so far, each time there is more."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    before = termios.tcgetattr(theirs)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, start_new_session=True,
        env={**environment, "TERM": "xterm-256color", **(env or {})},
    )  # fmt: skip
    written = b""
    try:
        while process.poll() is None or select.select([ours], [], [], 0)[0]:
            if select.select([ours], [], [], 0.05)[0]:
                written += os.read(ours, 65536)
                when(written.decode(errors="replace"), process)
        restored = termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)
        os.close(theirs)
    return Ended(code=process.returncode, written=written.decode(), restored=restored)


def lines(written: str) -> list[str]:
    """The lines that stand there in the end, of a terminal that is high enough for all of them."""
    screen: list[list[str]] = [[]]
    row = column = place = 0
    while place < len(written):
        match = CONTROL.match(written, place)
        if match:
            place = match.end()
            number = int(match[1]) if match[1].isdecimal() else 1
            if match[2] == "A":
                row = max(0, row - number)
            elif match[2] == "K":
                screen[row] = []
            elif match[2] not in "mhl":
                raise AssertionError(f"a control that is not known here: {match[0]!r}")
            continue
        letter = written[place]
        place += 1
        if letter == "\r":
            column = 0
        elif letter == "\n":
            row += 1
            screen.extend([] for _ in range(row + 1 - len(screen)))
        else:
            screen[row].extend(" " * (column + 1 - len(screen[row])))
            screen[row][column] = letter
            column += 1
    return ["".join(line).rstrip() for line in screen]


if __name__ == "__main__":
    print("\n".join(on_terminal(sys.argv[1:]).seen))
