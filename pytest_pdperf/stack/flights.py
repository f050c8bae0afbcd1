"""Requests that can be watched, and left, while they are under way: what a fault does shows in the middle of one."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import cast

import httpx

from .greedy import body_of


class Flight:
    """One streamed request. Its attributes grow while it flies; read them from any thread."""

    def __init__(self, prompt: Sequence[int], output: int) -> None:
        self.prompt = tuple(prompt)
        self.output = output
        """Tokens asked for."""
        self.status: int | None = None
        self.id = ""
        """Of the answer; some routers tell in it which engines served."""
        self.tokens: list[int] = []
        self.counted: int | None = None
        """Tokens as the server counted them."""
        self.error = ""
        self.whole = False
        """The stream came to the end that its protocol has."""
        self.left = False
        """The client closed the connection."""
        self.sent_s = 0.0
        self.first_s: float | None = None
        """When the first token came, on the fleet's clock."""
        self.ended_s: float | None = None

    @property
    def seen(self) -> int:
        """Tokens that have come."""
        return len(self.tokens) or self.counted or 0

    @property
    def over(self) -> bool:
        """True once nothing more will come."""
        return self.ended_s is not None

    @property
    def complete(self) -> bool:
        """True for an answer with every token that was asked for, its proper end, and no error."""
        count = self.counted if self.counted is not None else len(self.tokens)
        return self.over and not self.error and self.status == 200 and self.whole and count == self.output

    def words(self) -> str:
        """What the client was told, in one line."""
        if self.complete:
            return "complete"
        if not self.over:
            return f"still open after {self.seen} tokens"
        if self.left:
            return f"left by the client after {self.seen} tokens"
        if self.error:
            return self.error
        return f"ended after {self.seen} of {self.output} tokens as if all were well"

    def take(self, event: Mapping[str, object]) -> None:
        """Add what one event of the stream says."""
        meta, usage = event.get("meta_info"), event.get("usage")
        if event.get("error"):
            self.error = (
                f"HTTP {self.status}, then an error in the stream: {json.dumps(event['error'])[:200]}"
            )
        ended = meta.get("finish_reason") if isinstance(meta, Mapping) else None
        if isinstance(ended, Mapping) and ended.get("type") == "abort":
            self.error = f"HTTP {self.status}, then aborted: {str(ended.get('message'))[:200]}"
        for counts in (meta, usage):
            if isinstance(counts, Mapping) and isinstance(counts.get("completion_tokens"), int):
                self.counted = cast(int, counts["completion_tokens"])
        self.id = self.id or str(event.get("id") or "")
        ids = event.get("output_ids")
        if isinstance(ids, list):
            # SGLang repeats all tokens so far unless it was told otherwise.
            whole = self.counted is not None and len(ids) == self.counted
            self.tokens = [*ids] if whole else [*self.tokens, *ids]
        choices = event.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            self.tokens += [int(token) for token in choice.get("token_ids") or ()]


class Fleet:
    """Sends requests in the background, from an event loop in a thread of its own. Use as a context manager."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        form: str,
        timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url, self._model, self._form, self._timeout_s = url, model, form, timeout_s
        self._clock = clock
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fleet", daemon=True)
        self._flying: dict[int, Future[None]] = {}
        self._http: httpx.AsyncClient | None = None

    def __enter__(self) -> Fleet:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def send(
        self,
        prompt: Sequence[int],
        output: int,
        *,
        url: str = "",
        extra: Mapping[str, object] | None = None,
    ) -> Flight:
        """Send one request, to another `url` and with `extra` fields where given; returns at once."""
        flight = Flight(prompt, output)
        flight.sent_s = self._clock()
        self._flying[id(flight)] = asyncio.run_coroutine_threadsafe(
            self._fly(flight, url or self._url, extra or {}), self._loop
        )
        return flight

    def leave(self, flight: Flight) -> None:
        """Close the connection of a request under way, as a client does that has lost interest."""
        flight.left = not flight.over
        self._flying[id(flight)].cancel()

    async def _end(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._http is not None:
            await self._http.aclose()

    async def _fly(self, flight: Flight, url: str, extra: Mapping[str, object]) -> None:
        if self._http is None:
            limits = httpx.Limits(max_keepalive_connections=0)
            self._http = httpx.AsyncClient(
                trust_env=False, verify=False, timeout=self._timeout_s, limits=limits
            )
        path, body = body_of(self._model, flight.prompt, flight.output, form=self._form, stream=True)
        try:
            async with self._http.stream("POST", url + path, json={**body, **extra}) as answer:
                flight.status = answer.status_code
                if answer.status_code != 200:
                    text = " ".join((await answer.aread()).decode(errors="replace").split())
                    flight.error = f"HTTP {answer.status_code}: {text[:200]}"
                    return
                async for line in answer.aiter_lines():
                    self._line(flight, line.removeprefix("data:").strip() if line.startswith("data:") else "")
            if not flight.whole and not flight.error:
                flight.error = f"ended after {flight.seen} tokens without [DONE]"
        except httpx.TimeoutException:
            flight.error = f"no answer, or no further token, for {self._timeout_s:g} s ({flight.seen} tokens)"
        except (httpx.HTTPError, ValueError) as problem:
            flight.error = f"broken off after {flight.seen} tokens: {type(problem).__name__}"
        finally:
            flight.ended_s = self._clock()

    def _line(self, flight: Flight, value: str) -> None:
        if value == "[DONE]":
            flight.whole = True
        elif value:
            event = json.loads(value)
            if isinstance(event, Mapping):
                flight.take(event)
        if flight.first_s is None and flight.seen:
            flight.first_s = self._clock()
