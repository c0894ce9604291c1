# SPDX-License-Identifier: Apache-2.0
"""Forward passes on simulated memory: what they read must be right."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from vllm.v1.kv_cache_interface import MambaSpec

from ..names import cdiv
from . import upstream
from .content import EMPTY, GARBAGE, VOCAB, Sequence, Violation
from .layouts import Group, Layout
from .pages import DeviceMemory
from .real_ranks import RealRanks
from .step import Step


@dataclass
class _Request:
    sequence: Sequence
    tables: list[list[int]]
    """Device block ids of each group."""
    state_index: int | None = None
    """Index in the tables of the block with the running state (Mamba)."""
    state_offset: int = 0
    """So many blocks behind that one is the state that was right: one is left for each
    guess that was."""
    num_computed: int = 0
    """What the runner has counted of the prompt, and of what it was resumed with."""

    def copy(self) -> "_Request":
        tables = [table.copy() for table in self.tables]
        return _Request(
            self.sequence.copy(),
            tables,
            self.state_index,
            self.state_offset,
            self.num_computed,
        )


class ForwardPasses:
    """Device memory of one rank, and the forward passes that read and write it.

    Args:
        layout: Groups of the model.
        num_blocks: Device blocks.
        roots: By request id, what its KV depends on beside its tokens.

    """

    def __init__(self, layout: Layout, num_blocks: int, roots: dict[str, int]) -> None:
        self.num_remote = 0
        """Loads of a KV connector."""
        self.num_drafts = 0
        """Tokens that are guessed after each step of a request."""
        self.pools = False
        """Whether requests end with their prompts, as those of pooling models."""
        self.real_ranks: RealRanks | None = None
        """Do the same on real memory."""
        # What blocks held before the step, for them.
        self._before: list[list[int]] = []
        self._roots = roots
        self.embedded: dict[str, list[int]] = {}
        """By request id, what the embeddings of its prompt stand for."""
        self._layout = layout
        self._width = layout.block_size
        self.device = DeviceMemory([EMPTY] * self._width for _ in range(num_blocks))
        self._requests: dict[str, _Request] = {}

    def _forward(self, step: Step) -> list[list[int]]:
        """Returns the tokens that each request of `step` samples."""
        output = step.output
        computed = self._update_requests(step)
        for load in upstream.remote_loads(output):
            self.num_remote += 1
            self._load_remote(self._requests[load.req_id], load.start, load.end)
        scheduled = output.num_scheduled_tokens
        if step.fail == "compute":
            step.spoiled.update(list(scheduled)[:1])
        for req_id in scheduled:
            if not self._begin_states(req_id, computed[req_id], scheduled[req_id]):
                self._spoil(step, req_id)
        sampled: list[list[int]] = []
        step.pooled, step.drafts = [], {}
        for req_id, num_tokens in scheduled.items():
            request = self._requests[req_id]
            start, end = computed[req_id], computed[req_id] + num_tokens
            if not self._is_read_right(request, start):
                self._spoil(step, req_id)
            is_spoiled = req_id in step.spoiled
            tokens = request.sequence.tokens
            num_known = len(tokens)
            drafts = upstream.drafts(output, req_id)
            sampled.append([])
            if self.pools:
                step.pooled.append(end >= num_known)
            elif end >= num_known:
                sampled[-1] += self._sample(request.sequence, drafts, is_spoiled)
            # A draft that was right is a token now, and the others leave garbage.
            right = min(end, num_known + len(sampled[-1][1:]))
            self._write(request, start, right, is_spoiled)
            self._write_rejected(request, right, end)
            num_guesses = max(0, end - num_known)
            self._write_states(request, right, end, num_guesses, is_spoiled)
            if self.num_drafts and sampled[-1]:
                step.drafts[req_id] = self._draft(request.sequence)
            request.num_computed = end
        return sampled

    @staticmethod
    def _sample(sequence: Sequence, drafts: list[int], is_spoiled: bool) -> list[int]:
        """The tokens that follow a sequence: one more than there are right drafts."""
        sampled: list[int] = []
        for draft in [*drafts, None]:
            token = (sequence.next_token() + is_spoiled) % VOCAB
            sequence.append(token)
            sampled.append(token)
            if draft != token:
                break
        return sampled

    def _draft(self, sequence: Sequence) -> list[int]:
        """Guesses of the tokens that follow. How many are right depends on these."""
        guess = sequence.copy()
        num_right = hash(tuple(guess.tokens)) % (self.num_drafts + 1)
        drafts: list[int] = []
        for i in range(self.num_drafts):
            drafts.append((guess.next_token() + (i >= num_right)) % VOCAB)
            guess.append(drafts[-1])
        return drafts

    def _load_remote(self, request: _Request, start: int, end: int) -> None:
        """What a KV connector brings, but for blocks that no layer reads any more."""
        for group, table, values in zip(
            self._layout.groups, request.tables, request.sequence.values, strict=True
        ):
            size = group.block_size
            if group.first_read is None:
                block = self._writable(table[(end - 1) // size])
                self.device[block] = [values[end - 1]] * self._width
                continue
            for position in range(start, end):
                if block := table[position // size]:
                    self.device[block][position % size] = values[position]

    def _write_rejected(self, request: _Request, start: int, end: int) -> None:
        for group, table in zip(self._layout.groups, request.tables, strict=True):
            if group.first_read is None:
                continue
            size = group.block_size
            for position in range(start, end):
                block = self._writable(table[position // size])
                self.device[block][position % size] = GARBAGE

    def _update_requests(self, step: Step) -> dict[str, int]:
        """Take over what is new.

        Returns:
            Number of computed tokens of every scheduled request.

        """
        output = step.output
        computed: dict[str, int] = {}
        for req_id in output.finished_req_ids:
            self._requests.pop(req_id, None)
        for new in output.scheduled_new_reqs:
            tokens = upstream.prefill_tokens(new)
            self._begin(step, new.req_id, tokens, new.block_ids)
            computed[new.req_id] = new.num_computed_tokens
            self._requests[new.req_id].num_computed = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            block_ids = cached.new_block_ids[i]
            computed[req_id] = cached.num_computed_tokens[i]
            request = self._requests[req_id]
            tokens = upstream.resumed_tokens(cached, req_id)
            if tokens is None:
                self._check_count(step, req_id, computed[req_id])
            if tokens is not None:
                self._begin(step, req_id, tokens, block_ids)
            elif block_ids is not None:
                for table, new_ids in zip(request.tables, block_ids, strict=True):
                    table.extend(new_ids)
        return computed

    def _check_count(self, step: Step, req_id: str, num_computed: int) -> None:
        """Model runner V2 counts itself, but for requests that the plan names. Guesses
        that were wrong are none of a prompt."""
        request = self._requests[req_id]
        if req_id in step.plan.jumped:
            request.num_computed = num_computed
        is_prompt = request.num_computed < len(request.sequence.tokens) - 1
        if is_prompt and request.num_computed != num_computed:
            counted = f"{request.num_computed}, not {num_computed}"
            raise Violation("count", f"{req_id} has {counted} tokens in {step}")

    def _begin(
        self,
        step: Step,
        req_id: str,
        tokens: list[int],
        block_ids: Seq[Seq[int]],
    ) -> None:
        root = self._roots[req_id]
        embedded = self.embedded.get(req_id, [])
        tokens = [*embedded, *tokens[len(embedded) :]]
        sequence = Sequence(root, len(self._layout.groups), step.epoch, tokens)
        self._requests[req_id] = _Request(sequence, [list(ids) for ids in block_ids])

    def _spoil(self, step: Step, req_id: str) -> None:
        if not step.is_void:
            raise Violation("read", f"{req_id} reads a wrong value in {step}")
        step.spoiled.add(req_id)

    def _begin_states(self, req_id: str, start: int, num_tokens: int) -> bool:
        """Bring running states to the blocks that this step writes.

        Returns:
            Whether they are the right ones.

        """
        request = self._requests[req_id]
        before, is_right = request.state_index, True
        for g, group in enumerate(self._layout.groups):
            if group.first_read is not None:
                continue
            size, table = group.block_size, request.tables[g]
            if group.keeps_all_states:
                want = request.sequence.values[g][start - 1] if start else None
                state = self.device[table[(start - 1) // size]][0] if start else None
                is_right &= state == want
                continue
            source = (start - 1) // size if before is None else before
            target = (start + num_tokens - 1) // size
            request.state_index = target
            offset = request.state_offset
            if start > 0:
                want = request.sequence.values[g][start - 1]
                self._real_read(table[source + offset], 0, [want])
            if source not in (-1, target):
                self.device[table[target]] = self.device[table[source + offset]].copy()
                offset = 0
            if start > 0:
                want = request.sequence.values[g][start - 1]
                is_right &= self.device[table[target + offset]][0] == want
        return is_right

    def _is_read_right(self, request: _Request, start: int) -> bool:
        for group, table, values in zip(
            self._layout.groups, request.tables, request.sequence.values, strict=True
        ):
            if group.first_read is None:
                continue
            size = group.block_size
            position = group.first_read(start)
            while position < start:
                index, offset = divmod(position, size)
                end = min(start, (index + 1) * size)
                have = self.device[table[index]][offset : offset + end - position]
                if have != values[position:end]:
                    return False
                self._real_read(table[index], offset, have)
                position = end
        return True

    def _real_read(self, block: int, offset: int, values: list[int]) -> None:
        """Real ranks have what is read, unless this step has written it."""
        if self.real_ranks is None:
            return
        end = offset + len(values)
        if self._before[block][offset:end] == values:
            self.real_ranks.check(block, offset, values)

    def _write(self, request: _Request, start: int, end: int, is_spoiled: bool) -> None:
        for group, table, values in zip(
            self._layout.groups, request.tables, request.sequence.values, strict=True
        ):
            size = group.block_size
            if group.keeps_all_states:
                for i in range(start // size, cdiv(end, size)):
                    state = (
                        GARBAGE if is_spoiled else values[min((i + 1) * size, end) - 1]
                    )
                    block = self._writable(table[i])
                    self.device[block] = [state] * self._width
                continue
            if group.first_read is None:
                self._write_checkpoint(group, table, values, start, end, is_spoiled)
                continue
            for position in range(start, end):
                block = self._writable(table[position // size])
                value = GARBAGE if is_spoiled else values[position]
                self.device[block][position % size] = value

    def _write_states(
        self,
        request: _Request,
        right: int,
        end: int,
        num_guesses: int,
        is_spoiled: bool,
    ) -> None:
        """Leave the state behind what was known, and one behind each guess.

        As upstream does, which then has the state at the end of a block where the block
        keeps it.
        """
        known = end - num_guesses
        request.state_offset = right - known
        for group, table, values in zip(
            self._layout.groups, request.tables, request.sequence.values, strict=True
        ):
            if group.first_read is not None or group.keeps_all_states:
                continue
            base = request.state_index
            assert base is not None
            for i in range(num_guesses + 1):
                is_right = known + i <= right and not is_spoiled
                state = values[known + i - 1] if is_right else GARBAGE
                self.device[self._writable(table[base + i])] = [state] * self._width
            aligned = right // group.block_size * group.block_size
            if aligned >= known:
                source, target = base + aligned - known, aligned // group.block_size - 1
                if source != target:
                    block = self._writable(table[target])
                    self.device[block] = self.device[table[source]].copy()
                if base == target:
                    request.state_offset = 0

    def _write_checkpoint(
        self,
        group: Group,
        table: list[int],
        values: list[int],
        start: int,
        end: int,
        is_spoiled: bool,
    ) -> None:
        """Keep a state from inside the chunk, where the backend does."""
        spec = group.spec
        assert isinstance(spec, MambaSpec)
        if not upstream.num_checkpoint_blocks(spec):
            return
        offset, index = upstream.prefill_checkpoint(
            spec, start, end, self._layout.hash_block_size, self._layout.hit_alignment
        )
        # A request that needs no checkpoint has the null block there.
        if index >= 0 and table[index] != 0:
            state = GARBAGE if is_spoiled else values[start + offset - 1]
            self.device[table[index]] = [state] * self._width

    @staticmethod
    def _writable(block: int) -> int:
        if block == 0:
            raise Violation("read", "a forward pass writes the null block")
        return block
