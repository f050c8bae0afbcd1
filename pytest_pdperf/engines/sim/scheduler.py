"""The step model of one engine: what a continuous-batching scheduler does, without a GPU and on any clock."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from itertools import count

from .faults import Faults
from .profile import Profile
from .sequence import Sequence, State, Step


class StepScheduler:
    """Runs the steps of one engine: chunked prefill under a token budget, decode batches, KV blocks.

    Pure and event-driven: `submit` says when a request reaches the queue, `next_time` when something happens next,
    `advance(now)` lets it happen. Step ends follow from the model alone, never from when `advance` was called, so a
    late caller shifts nothing. No preemption: a sequence starts only when blocks for all its tokens are free.
    """

    def __init__(
        self,
        profile: Profile,
        *,
        noise: Callable[[], float] = lambda: 1.0,
        faults: Faults | None = None,
        max_seqs: int | None = None,
        token_budget: int | None = None,
        kv_blocks: int | None = None,
        started_s: float = 0.0,
    ) -> None:
        self._profile = profile
        self._noise = noise
        self.misbehave(faults or Faults(), started_s)
        self.max_seqs = max_seqs or profile.max_seqs
        self.token_budget = token_budget or profile.token_budget
        self.kv_blocks = kv_blocks or profile.kv_blocks
        self._arrivals: list[tuple[float, int, Sequence]] = []
        self._order = count()
        self._ready: deque[Sequence] = deque()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._last_step: dict[int, list[Sequence]] = {}
        self._held: dict[int, Sequence] = {}
        self._reserved: dict[int, Sequence] = {}
        self._chunks: list[tuple[Sequence, int]] = []
        self._context = 0
        self._index = 0
        self._start = 0.0
        self._free_from = 0.0
        self._end: float | None = None
        self._committed = 0
        self._leaked = 0
        self._kick: float | None = None
        """When blocks came free for a queue that had been waiting for them in an idle engine."""

    # -- what the owner does

    def submit(self, seq: Sequence, at: float) -> None:
        """Put a sequence in the queue at time `at`, now or later; `advance` up to now must have been called."""
        if seq.state is not State.NEW:
            raise ValueError("a sequence is submitted once")
        if seq.kv_ready and not seq.blocks and not self.reserve(seq):
            raise ValueError("KV cannot be ready without reserved blocks")
        seq.state = State.QUEUED
        seq.queued_s = at
        heapq.heappush(self._arrivals, (at, next(self._order), seq))

    def reserve(self, seq: Sequence) -> bool:
        """Take blocks for KV that is about to arrive from elsewhere; False when there are not enough."""
        if not self._allocate(seq):
            return False
        self._reserved[id(seq)] = seq
        return True

    def cancel(self, seq: Sequence, now: float) -> None:
        """Drop a sequence wherever it stands and free its blocks; a finished one is left alone."""
        if seq.state in (State.DONE, State.CANCELLED):
            return
        if seq.state is State.RUNNING and seq in self._running:
            self._running.remove(seq)
            self._context -= seq.prompt_tokens + self._index - seq.first_step
        elif seq.state is State.QUEUED:
            self._arrivals = [item for item in self._arrivals if item[2] is not seq]
            heapq.heapify(self._arrivals)
            for queue in (self._ready, self._waiting):
                if seq in queue:
                    queue.remove(seq)
        self._free(seq, State.CANCELLED)
        self._retry(now)

    def release(self, seq: Sequence, now: float) -> None:
        """Give back the blocks of a held sequence; anything else is left alone."""
        if seq.state is State.HELD:
            self._free(seq, State.DONE)
            self._retry(now)

    def next_time(self) -> float | None:
        """End of the running step, or the next arrival at an idle engine; None when there is nothing to do."""
        if self._end is not None:
            return self._end
        if self._kick is not None:
            return self._kick
        return self._arrivals[0][0] if self._arrivals else None

    def advance(self, now: float) -> list[Step]:
        """Let time pass to `now`; the steps that ended, in order."""
        done: list[Step] = []
        while True:
            if self._end is None:
                start = self.next_time()
                if start is None or start > now:
                    return done
                if not self._begin(max(start, self._free_from)):
                    continue
            if self._end is None or self._end > now:
                return done
            end = self._free_from = self._end
            done.append(self._finish(end))
            self._begin(end)

    def skip(self, limit: float, ends: list[float]) -> int:
        """Run the steps up to `limit` that only decode and end nothing, appending their ends; how many they were.

        The same as `advance` for them, without a Step each: for owners that need no more than the times.
        """
        done = 0
        end = self._end
        if end is None or self._chunks or self._waiting or self._ready:
            return 0
        arrivals = self._arrivals
        if arrivals:
            limit = min(limit, arrivals[0][0])
        if self._throttle != 1.0:
            limit = min(limit, self._throttle_from_s)
        sequences = len(self._running)
        last_step, noise = self._last_step, self._noise
        per_token = self._decode_factor * self._profile.decode_context_s
        fixed = self._decode_factor * self._profile.decode_s(sequences, 0)
        context, index = self._context, self._index
        while end < limit and index not in last_step:
            ends.append(end)
            context += sequences
            index += 1
            self._start = end
            end += (fixed + per_token * context) * noise()
            done += 1
        if done:
            self._context, self._index, self._end = context, index, end
            self._free_from = self._start
        return done

    def quiet_until(self) -> float:
        """A moment before which no sequence begins or ends, whatever `skip` or `advance` do until then.

        A lower bound from the steps left to the next last token, each at least as long as the next one without noise
        (so `noise` must not give less than 1); infinity for an engine with nothing to do.
        """
        end = self._end
        if end is None:
            due = self.next_time()
            return float("inf") if due is None else due
        if self._chunks or self._waiting or self._ready:
            return end
        steps = min(self._last_step, default=self._index) - self._index
        length = self._decode_factor * self._profile.decode_s(len(self._running), self._context)
        bound = end + max(0, steps) * length * min(1.0, self._throttle)
        return max(end, min(bound, self._arrivals[0][0])) if self._arrivals else bound

    def misbehave(self, faults: Faults, now: float) -> None:
        """Steps that begin from `now` on have the lengths that these faults give them."""
        self._prefill_factor = faults.prefill
        self._decode_factor = faults.decode_step
        self._throttle = faults.throttle.factor
        self._throttle_from_s = now + faults.throttle.after_s

    # -- what the owner may look at

    @property
    def running(self) -> int:
        """Sequences being decoded or prefilled."""
        return len(self._running) + sum(1 for seq in self._waiting if seq.blocks)

    @property
    def waiting(self) -> int:
        """Sequences in a queue or waiting for their KV."""
        arrived = len(self._arrivals) + len(self._ready) + sum(1 for s in self._waiting if not s.blocks)
        return arrived + sum(1 for seq in self._reserved.values() if seq.state is State.NEW)

    @property
    def idle(self) -> bool:
        """True when no step runs and no request is known."""
        return self._end is None and not self._arrivals and not self._waiting and not self._ready

    @property
    def used_blocks(self) -> int:
        """Blocks that hold KV now, leaked ones included."""
        lists = (self._running, self._waiting, self._held.values(), self._reserved.values())
        return self._leaked + sum(self._filled(seq) for sequences in lists for seq in sequences if seq.blocks)

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache in use, 0 to 1."""
        return self.used_blocks / self.kv_blocks

    # -- inside

    def _retry(self, now: float) -> None:
        if self._end is None and (self._waiting or self._ready):
            self._kick = now

    def _filled(self, seq: Sequence) -> int:
        """Blocks this sequence has filled: its computed prompt plus the tokens generated so far."""
        tokens = seq.computed
        if seq.state is State.RUNNING:
            tokens += max(0, self._index - seq.first_step)
        return min(seq.blocks, -(-tokens // self._profile.block_tokens))

    def _allocate(self, seq: Sequence) -> bool:
        need = -(-(seq.prompt_tokens + seq.max_tokens) // self._profile.block_tokens)
        if self._committed + need > self.kv_blocks:
            return False
        self._committed += need
        seq.blocks = need
        return True

    def _free(self, seq: Sequence, state: State) -> None:
        if seq.blocks:
            self._committed -= seq.blocks
            if seq.leaks:
                lost = max(1, self._filled(seq))
                self._leaked += lost
                self._committed += lost
            seq.blocks = 0
        self._held.pop(id(seq), None)
        self._reserved.pop(id(seq), None)
        seq.state = state

    def _begin(self, now: float) -> bool:
        """Start a step at `now` with what is there; False when there is nothing it could do."""
        self._kick = None
        arrivals = self._arrivals
        while arrivals and arrivals[0][0] <= now:
            seq = heapq.heappop(arrivals)[2]
            (self._ready if seq.kv_ready else self._waiting).append(seq)
        running = self._running
        while self._ready and len(running) < self.max_seqs:
            seq = self._ready.popleft()
            self._reserved.pop(id(seq), None)
            seq.scheduled_s = now
            self._join(seq, self._index)
        decoding = len(running)
        if self._waiting:
            self._take_chunks(now, self.token_budget - decoding)
        elif not decoding:
            self._end = None
            return False
        length = self._length(decoding)
        if length <= 0.0:
            self._end = None
            return False
        if self._throttle != 1.0 and now >= self._throttle_from_s:
            length *= self._throttle
        self._start = now
        self._end = now + length * self._noise()
        return True

    def _join(self, seq: Sequence, first_step: int) -> None:
        seq.state = State.RUNNING
        seq.first_step = first_step
        self._running.append(seq)
        self._context += seq.prompt_tokens
        self._last_step.setdefault(first_step + seq.max_tokens - 1, []).append(seq)

    def _take_chunks(self, now: float, budget: int) -> None:
        """Fill this step's prefill share from the head of the queue, splitting the last prompt if need be."""
        places = self.max_seqs - len(self._running)
        for seq in self._waiting:
            if budget <= 0 or places <= 0:
                break
            if not seq.blocks:
                if not self._allocate(seq):
                    break
                seq.scheduled_s = now
            tokens = min(budget, seq.prompt_tokens - seq.computed)
            self._chunks.append((seq, tokens))
            budget -= tokens
            places -= 1

    def _length(self, decoding: int) -> float:
        """Length of the step in seconds (calibration page, "Step of an engine"); 0 when it has no work."""
        profile = self._profile
        if not self._chunks:
            if not decoding:
                return 0.0
            return self._decode_factor * profile.decode_s(decoding, self._context)
        share = sum(profile.prefill_s(tokens, seq.computed) for seq, tokens in self._chunks)
        length = self._prefill_factor * share
        if decoding:
            decode = profile.decode_sequence_s * decoding + profile.decode_context_s * self._context
            length += self._decode_factor * decode
        return max(self._prefill_factor * profile.prefill_floor_s, length)

    def _finish(self, end: float) -> Step:
        index = self._index
        running = self._running
        emitted = running.copy()
        decoding = len(emitted)
        self._context += decoding
        first: list[Sequence] = []
        prefill_tokens = 0
        if self._chunks:
            for seq, tokens in self._chunks:
                prefill_tokens += tokens
                if seq.state is not State.QUEUED:
                    continue
                seq.computed += tokens
                if seq.computed == seq.prompt_tokens:
                    self._waiting.remove(seq)
                    self._join(seq, index)
                    self._context += 1
                    first.append(seq)
            self._chunks = []
            emitted += first
        self._index = index + 1
        finished = self._last_step.pop(index, None)
        if finished:
            finished = [seq for seq in finished if seq.state is State.RUNNING]
            for seq in finished:
                running.remove(seq)
                self._context -= seq.prompt_tokens + seq.max_tokens
                if seq.hold:
                    seq.state = State.HELD
                    self._held[id(seq)] = seq
                else:
                    self._free(seq, State.DONE)
        return Step(index, self._start, end, emitted, first, finished or [], prefill_tokens, decoding)
