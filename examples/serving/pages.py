"""Which pages of the cache are whose: free, taken, shared by requests that begin alike, kept.

A page that is full may be named by what it holds: its tokens, behind those of the page before.
Requests that begin with the same tokens find it by that name and have it in common. Nobody writes a
full page, so none disturbs the others. A named page without user is kept until room is needed.
"""

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

BEGIN = 0  # the number of what is before the first page

Name = tuple[int, tuple[int, ...]]  # the number of the page before, and the page's own tokens


class Pages:
    """The bookkeeping of `count` pages of `size` positions each; it holds no keys or values."""

    def __init__(self, count: int, size: int):
        self.count, self.size = count, size
        self._free = list(range(count))
        self.users = np.zeros(count, np.int64)  # requests that have each page
        self._kept: OrderedDict[int, None] = OrderedDict()  # named, without user, oldest first
        self._named: dict[Name, tuple[int, int]] = {}  # the page, and a number that never returns
        self._names: dict[int, Name] = {}  # of pages
        self._numbers = itertools.count(BEGIN + 1)

    @property
    def available(self) -> int:
        """How many pages can be taken."""
        return len(self._free) + len(self._kept)

    def find(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Takes the pages that hold what `tokens` begin with; their last token is always left over.

        Returns: the pages, and the number of the last of them.
        """
        found, before = [], BEGIN
        for start in range(0, len(tokens) - self.size, self.size):
            name = before, tuple(tokens[start : start + self.size])
            if name not in self._named:
                break
            page, before = self._named[name]
            self.users[page] += 1
            self._kept.pop(page, None)
            found.append(page)
        return found, before

    def take(self) -> int:
        """Takes one page, where one is available, and whatever was kept in it is forgotten."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._kept.popitem(last=False)
            del self._named[self._names.pop(page)]
        self.users[page] = 1
        return page

    def name(self, page: int, before: int, tokens: Sequence[int]) -> int:
        """Lets `find` find a full page, which holds `tokens` behind the page of number `before`.

        Returns: its number, or that of the page which holds the same already.
        """
        name = before, tuple(tokens)
        if name not in self._named:
            self._named[name] = page, next(self._numbers)
            self._names[page] = name
        return self._named[name][1]

    def release(self, pages: Sequence[int]) -> None:
        """Gives pages of one user back; the last go first where room is needed."""
        for page in reversed(pages):
            self.users[page] -= 1
            if self.users[page] == 0:
                if page in self._names:
                    self._kept[page] = None
                else:
                    self._free.append(page)
