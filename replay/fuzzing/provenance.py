"""Whose page is it: an account of who wrote what, kept apart from the prefix cache and its keys.

The oracle's memory holds token ids, so it cannot tell K/V of one context from K/V of equal tokens in another: that a
found page was written behind the same tokens, under the same salt, weights and generation, is looked at here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from leftfold.events import Join
from leftfold.replay.fuzzing.clients import Client
from leftfold.replay.fuzzing.errors import Violation


class Written(NamedTuple):
    """Who was granted a page for its `number`-th, and in which generation."""

    client: Client
    number: int
    generation: int


class Provenance:
    """`generation`: how often what was cached was outdated."""

    def __init__(self) -> None:
        self.generation = 0
        self._pages: dict[int, Written] = {}

    def outdate(self) -> None:
        """What was written so far may not be found any more, nor what those write who run now."""
        self.generation += 1

    def lose(self) -> None:
        """The content of all pages is gone."""
        self._pages.clear()

    def join(self, join: Join, client: Client, page_size: int, there: bool) -> None:
        """A row takes pages; what it found must be its own context. `there`: there is a prefix cache.

        Raises `Violation`.
        """
        pages, shared = list(join.pages[0]), join.start // page_size
        if len(pages) != -(-client.known // page_size):
            raise Violation("pages", f"{client.key} joins with {client.known} tokens and gets {pages}")
        if shared:
            if not there or client.cache == "off":
                raise Violation("found", f"{client.key} finds {shared} pages and may not look for any")
            self._compare(pages[:shared], client, page_size)
        self.grant(pages[shared:], client, shared)

    def grant(self, pages: Iterable[int], client: Client, first: int) -> None:
        """`pages` become the `first`-th and following ones of `client`."""
        for index, page in enumerate(pages, first):
            self._pages[page] = Written(client, index, self.generation)

    def _compare(self, pages: list[int], client: Client, page_size: int) -> None:
        context = client.context
        for index, page in enumerate(pages):
            written, end = self._pages.get(page), (index + 1) * page_size
            if written is None:
                raise Violation("found", f"{client.key} finds page {page}, whose content is lost")
            writer = written.client
            if written.generation != self.generation:
                raise Violation("found", f"{client.key} finds page {page} of {writer.key}, which is outdated")
            if writer.cache != "use" or writer.salt != client.salt:
                raise Violation("found", f"{client.key} finds page {page} of {writer.key}, which is not for it")
            if written.number != index or writer.known <= end or writer.context[:end] != context[:end]:
                raise Violation("found", f"{client.key} finds page {page} of {writer.key}, in another context")
