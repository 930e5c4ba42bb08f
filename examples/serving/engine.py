"""The engine: a loop of steps, each of which computes tokens of all running requests at once.

A request waits until the pages of its prompt are there. From then on each step takes some of its
tokens: a part of a long prompt, or the one that was drawn last. Requests that decode come first in
a step, prompts fill what is left of it, so a long prompt delays nobody. Where pages run out the
youngest request gives its own back, waits, and is computed again later.
"""

import dataclasses
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from serving.model import FADES, Batch, Model, run_step
from serving.pages import BEGIN, Pages

Event = tuple[int, float] | str | Exception  # a token and its log-probability; why it ends; a fault


class OverloadedError(Exception):
    """As many requests wait as may."""


@dataclasses.dataclass(eq=False)
class Request:
    """What is asked for, and how far it is. `send` gets each event, in the engine's thread."""

    prompt: list[int]
    most: int  # new tokens
    send: Callable[[Event], None]
    temperature: float = 1.0  # 0: the likeliest token
    seed: int = 0
    given: list[int] | None = None  # new tokens to take in place of drawing: for their probability

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)  # and those drawn
        self.cancelled = False
        self.forget()

    def forget(self) -> None:
        """Begins anew, without pages."""
        self.pages: list[int] = []
        self.done = 0  # tokens that were computed
        self.dropped = 0  # of those, how many have no place in the pages any more
        self.count = 0  # tokens in the next step
        self.named, self.number = 0, BEGIN  # pages that others can find, and the last one's number
        self.weights = np.zeros(0, np.float32)  # what each page weighs

    @property
    def left(self) -> int:
        """How many tokens are to be computed before the next can be drawn."""
        return len(self.tokens) - self.done

    @property
    def cached(self) -> int:
        """How many positions its pages hold."""
        return self.done - self.dropped


class Engine:
    """Serves a model: `submit` requests from any thread, while `run` is at work in one.

    Arguments:
      model: what to serve.
      pages, page_size: how many pages the cache has, and positions in each.
      requests, tokens: at most in a step, which are compiled once.
      waiting: how many more requests may wait.
      keep: the share of a text's positions whose pages a request keeps, once its prompt is
        computed: those that its tokens gave most weight, the first, and the newest
        (Scissorhands, arXiv:2305.17118). 1: all.
      cache_dtype: float8_e4m3fn or int8; None: that of the parameters.
      shared: pages that requests begin with are read once for all of them, where that spares so
        many positions of a step. An H200 gains from 70,000 on with 8 kv heads of 128, by a line
        through its times, and from 135,000 on with 4.
    """

    def __init__(
        self,
        model: Model,
        *,
        pages: int = 512,
        page_size: int = 16,
        requests: int = 16,
        tokens: int = 256,
        waiting: int = 256,
        keep: float = 1.0,
        cache_dtype: str | None = None,
        shared: int = 1 << 17,
    ):
        if min(pages, page_size, requests) < 1 or tokens <= requests or not 0 < keep <= 1:
            raise ValueError(
                f"pages {pages}, page_size {page_size}, requests {requests}, tokens {tokens}, "
                f"keep {keep}; expected 1 or more, tokens > requests, and keep in (0, 1]"
            )
        self.model, self.pages = model, Pages(pages, page_size)
        self.requests, self.tokens, self.keep, self.shared = requests, tokens, keep, shared
        self.columns = min(pages, -(-model.length // page_size))
        self.most_waiting = waiting
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # the oldest first
        self.fault: Exception | None = None
        self._kv = model.make_pages(pages, page_size, cache_dtype)
        self._changed, self._stopped = threading.Condition(), False
        for size in (requests, tokens):  # programs: decoding alone, and with prompts
            self._compute([], size)
            if (requests - 1) * self.columns * page_size >= shared:
                self._compute([], size, np.full(self.columns, -1, np.int32))

    @property
    def most_positions(self) -> int:
        """How many tokens a request may have, its prompt and new ones."""
        return min(self.model.length, self.columns * self.pages.size)

    def submit(self, request: Request) -> None:
        """Has a request wait for its turn.

        Raises: OverloadedError where too many wait, RuntimeError where the engine has failed,
        ValueError where the request never fits.
        """
        whole = len(request.prompt) + request.most
        if not request.prompt or request.most < 1 or whole > self.most_positions:
            raise ValueError(
                f"a prompt of {len(request.prompt)} tokens and {request.most} new ones; expected "
                f"1 or more of both, and at most {self.most_positions} together"
            )
        with self._changed:
            if self.fault is not None:
                raise RuntimeError("the engine has failed") from self.fault
            if len(self.waiting) >= self.most_waiting:
                raise OverloadedError(f"{len(self.waiting)} requests wait already")
            self.waiting.append(request)
            self._changed.notify()

    def cancel(self, request: Request) -> None:
        """Ends a request before its next step; it may have ended already."""
        request.cancelled = True

    def stop(self) -> None:
        """Ends `run`."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def run(self) -> None:
        """Computes steps until `stop`; of a fault all requests hear, and it stops."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self.waiting or self.running)
                if self._stopped:
                    return
            try:
                self.step()
            except Exception as fault:
                with self._changed:
                    self.fault = fault
                    for request in [*self.running, *self.waiting]:
                        request.send(fault)
                logging.getLogger(__name__).exception("the engine has failed")
                return

    def step(self) -> None:
        """Computes one step: of the requests that run, and of those that then fit."""
        with self._changed:
            for request in [*self.running, *self.waiting]:
                if request.cancelled:
                    self._remove(request)
            self._admit()
        self._plan()
        running = list(self.running)
        if not running:
            return
        decoding = all(request.count <= 1 for request in running)
        tokens, logs, weighed = self._compute(running, self.requests if decoding else self.tokens)
        for i, request in enumerate(running):
            request.done += request.count
            self._name(request)
            if weighed is not None:
                self._drop(request, weighed[i])
            if request.left == 0 and request.count > 0:
                self._add(request, int(tokens[i]), float(logs[i]))

    def _remove(self, request: Request) -> None:
        (self.running if request in self.running else self.waiting).remove(request)
        self.pages.release(request.pages)
        request.forget()

    def _admit(self) -> None:
        """Has those that waited longest run, while there is room for all of their tokens."""
        while self.waiting and len(self.running) < self.requests:
            request = self.waiting[0]
            request.pages, request.number = self.pages.find(request.tokens)
            request.named = len(request.pages)
            request.done = request.named * self.pages.size
            others = self._pages_of(len(request.tokens)) - request.named
            if others > self.pages.available:
                self.pages.release(request.pages)
                request.forget()
                return
            request.pages += [self.pages.take() for _ in range(others)]
            self.running.append(self.waiting.popleft())

    def _plan(self) -> None:
        """Says how many tokens of each request the next step has, and takes their pages."""
        room = self.tokens
        for request in sorted(self.running, key=lambda request: request.left > 1):
            request.count = min(request.left, room)
            room -= request.count
        for request in list(self.running):
            needed = self._pages_of(request.cached + request.count)
            while request in self.running and len(request.pages) < needed:
                if self.pages.available:
                    request.pages.append(self.pages.take())
                    continue
                youngest = self.running[-1]
                with self._changed:
                    self._remove(youngest)
                    self.waiting.appendleft(youngest)

    def _pages_of(self, positions: int) -> int:
        return -(-positions // self.pages.size)

    def _compute(self, running: list[Request], size: int, shared: Any = None) -> Any:
        """Runs the program of `size` tokens: tokens, log-probabilities and weights of pages."""
        rows = self.requests
        tokens, positions = np.zeros((2, size), np.int32)
        lengths, starts = np.zeros(rows, np.int32), np.zeros(rows + 1, np.int32)
        table = np.zeros((rows, self.columns), np.int32)
        temperature = np.zeros(rows, np.float32)
        seed, number, given = np.array([[0], [0], [-1]], np.int32).repeat(rows, 1)
        for i, x in enumerate(running):
            own = slice(starts[i], starts[i] + x.count)
            tokens[own] = x.tokens[x.done : x.done + x.count]
            positions[own] = np.arange(x.done, x.done + x.count)
            lengths[i], starts[i + 1] = x.cached + x.count, own.stop
            table[i, : len(x.pages)] = x.pages
            temperature[i], seed[i], number[i] = x.temperature, x.seed, len(x.tokens)
            if x.given is not None:
                given[i] = x.given[len(x.tokens) - len(x.prompt)]
        starts[len(running) + 1 :] = starts[len(running)]
        if running:
            shared = self._find_shared(table, lengths - np.diff(starts))
        batch = Batch(tokens, positions, lengths, table, starts, np.int32(len(running)), shared)
        model, draws = self.model, (temperature, seed, number, given)
        token, logs, self._kv, weighed = run_step(
            model.forward, model.weights, self._kv, batch, draws, weigh=self.keep < 1
        )
        return jax.device_get((token, logs, weighed))

    def _find_shared(self, table: np.ndarray, before: np.ndarray) -> np.ndarray | None:
        """Finds the pages that spare most if they are read once, of `before` [B] positions."""
        column = np.arange(self.columns)
        spared = self.pages.size * (column + 1) * (self.pages.users[table] - 1)
        spared[column >= before[:, None] // self.pages.size] = 0
        row, last = np.unravel_index(spared.argmax(), spared.shape)
        enough = spared[row, last] >= self.shared
        return np.where(column <= last, table[row], -1).astype(np.int32) if enough else None

    def _name(self, request: Request) -> None:
        """Lets others find the pages that have become full, unless some were dropped before."""
        while not request.dropped and (request.named + 1) * self.pages.size <= request.done:
            start = request.named * self.pages.size
            tokens = request.tokens[start : start + self.pages.size]
            page = request.pages[request.named]
            request.number = self.pages.name(page, request.number, tokens)
            request.named += 1

    def _drop(self, request: Request, weighed: np.ndarray) -> None:
        """Gives back the lightest pages beyond the budget; the first stays, and the newest half.

        What a page weighs fades: by 64 % in 50 tokens, so that old pages are no heavier for
        having been there longer.
        """
        before = np.zeros(len(request.pages), np.float32)
        before[: len(request.weights)] = request.weights
        request.weights = FADES**request.count * before + weighed[: len(request.pages)]
        if request.done < len(request.prompt):
            return  # a prompt is computed in full
        budget = max(3, math.ceil(self.keep * self._pages_of(request.done)))
        while len(request.pages) > budget:
            lightest = 1 + int(np.argmin(request.weights[1 : -(budget // 2)]))
            self.pages.release([request.pages.pop(lightest)])
            request.weights = np.delete(request.weights, lightest)
            request.dropped += self.pages.size

    def _add(self, request: Request, token: int, log: float) -> None:
        """Gives a request its next token, and ends it where that is the last."""
        event: Event | None = None
        if math.isnan(log):
            event = FloatingPointError("the model's scores are NaN")
        else:
            request.tokens.append(token)
            request.send((token, log))
            if token in self.model.ends and request.given is None:
                event = "stop"
            elif len(request.tokens) - len(request.prompt) == request.most:
                event = "length"
        if event is not None:
            with self._changed:
                self._remove(request)
            request.send(event)
