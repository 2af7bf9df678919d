"""The states of batches, as a model that the real store is compared with."""

import tempfile
from pathlib import Path

import pytest
import trio
from attrs import evolve
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from trio_pool_serve.errors import ConflictError, NotFoundError
from trio_pool_serve.runs.batch_api.batch_store import SCHEMA, BatchStore, Page
from trio_pool_serve.runs.batch_api.stored_records import FINAL, TRANSITIONS, StoredBatch, StoredFile, time_of
from trio_pool_serve.runs.run import Position
from trio_pool_serve.storage.database import open_database

OWNERS = ("", "one", "two")

BY_OPENAI = {
    "validating": {"in_progress", "failed", "cancelling", "expired"},
    "in_progress": {"finalizing", "cancelling", "failed"},
    "finalizing": {"completed", "expired", "failed"},
    "cancelling": {"cancelled", "failed"},
}
"""Which states may follow; no others have any behind them."""


def test_the_states_are_those_of_openai():
    import openai.types.batch

    (known,) = [openai.types.batch.Batch.model_fields["status"].annotation]
    assert set(known.__args__) == set(TRANSITIONS) > FINAL
    assert {status: set(following) for status, following in TRANSITIONS.items() if following} == BY_OPENAI
    names = set(openai.types.batch.Batch.model_fields)
    assert {time_of(status) for status in TRANSITIONS} <= names


def file_of(file_id: str, owner: str = "", **fields) -> StoredFile:
    return StoredFile(**{"id": file_id, "owner": owner, "purpose": "batch", "filename": "x", "bytes": 5, **fields})


def batch_of(batch_id: str, source: StoredFile, now: int) -> StoredBatch:
    return StoredBatch(
        id=batch_id,
        owner=source.owner,
        endpoint="/v1/embeddings",
        input_file_id=source.id,
        completion_window="24h",
        expires_at=now + 86400,
        output_id=f"{batch_id}-o",
        error_id=f"{batch_id}-e",
    )


class Batches(RuleBasedStateMachine):
    """The store over a real file, which is closed and opened again now and then; each step is one transaction."""

    ids = Bundle("ids")

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.now = 1000
        self.known: dict[str, StoredBatch] = {}

    def teardown(self) -> None:
        self.folder.cleanup()

    def run(self, work):
        async def main():
            async with open_database(Path(self.folder.name) / "database", SCHEMA) as database:
                return await work(BatchStore(database, clock=lambda: self.now))

        return trio.run(main)

    @rule(seconds=st.integers(0, 100))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(target=ids, owner=st.sampled_from(OWNERS))
    def create(self, owner: str) -> str:
        number = len(self.known)
        source = file_of(f"file-{number}", owner, created_at=self.now, digest=str(number))
        batch = batch_of(f"batch_{number}", source, self.now)

        async def add(store: BatchStore) -> StoredBatch:
            await store.add_file(source)
            return await store.add_batch(batch)

        added = self.run(add)
        assert added == evolve(
            batch, digest=str(number), input_created_at=self.now, times={"created_at": self.now}, status="validating"
        )
        self.known[batch.id] = added
        return batch.id

    @rule(batch_id=ids, to=st.sampled_from(sorted(TRANSITIONS)))
    def advance(self, batch_id: str, to) -> None:
        known = self.known[batch_id]
        if to in BY_OPENAI.get(known.status, ()):
            changed = self.run(lambda store: store.advance(batch_id, to, total=7))
            name = "created_at" if to == "validating" else f"{to}_at"
            self.known[batch_id] = evolve(known, status=to, total=7, times={**known.times, name: self.now})
            assert changed == self.known[batch_id]
        else:
            with pytest.raises(ConflictError, match=known.status):
                self.run(lambda store: store.advance(batch_id, to, total=7))

    @rule(batch_id=ids, owner=st.sampled_from(OWNERS))
    def cancel(self, batch_id: str, owner: str) -> None:
        known = self.known[batch_id]
        if owner != known.owner:
            with pytest.raises(NotFoundError):
                self.run(lambda store: store.cancel(owner, batch_id))
        elif known.status in ("validating", "in_progress"):
            times = {**known.times, "cancelling_at": self.now}
            self.known[batch_id] = evolve(known, status="cancelling", times=times)
            assert self.run(lambda store: store.cancel(owner, batch_id)) == self.known[batch_id]
        elif known.status in ("cancelling", "cancelled"):
            assert self.run(lambda store: store.cancel(owner, batch_id)) == known
        else:
            with pytest.raises(ConflictError):
                self.run(lambda store: store.cancel(owner, batch_id))

    @rule(batch_id=ids, lines=st.integers(1, 1000))
    def commit(self, batch_id: str, lines: int) -> None:
        position = Position(line=lines, offset=lines * 10, completed=lines, tokens=lines * 3)
        self.run(lambda store: store.commit(batch_id, position))
        self.known[batch_id] = evolve(self.known[batch_id], position=position)

    @rule(batch_id=ids)
    def remove_the_input(self, batch_id: str) -> None:
        known = self.known[batch_id]
        if known.status in FINAL:
            return
        with pytest.raises(ConflictError):
            self.run(lambda store: store.remove_file(known.owner, known.input_file_id))

    @invariant()
    def the_store_has_what_is_known(self) -> None:
        async def everything(store: BatchStore):
            pages = {owner: await store.batches(owner, Page(1000, newest_first=False)) for owner in OWNERS}
            return pages, await store.unfinished()

        pages, unfinished = self.run(everything)
        for owner in OWNERS:
            assert pages[owner] == ([batch for batch in self.known.values() if batch.owner == owner], False)
        assert unfinished == [batch for batch in self.known.values() if batch.status not in FINAL]


TestBatches = Batches.TestCase
TestBatches.settings = settings(max_examples=8, stateful_step_count=25, deadline=None)


async def test_files_and_batches_are_removed_after_their_time(tmp_path):
    now = 10_000_000
    async with open_database(tmp_path / "database", SCHEMA) as database:
        store = BatchStore(database, clock=lambda: now)
        for name, created_at, expires_at in (
            ("old", 0, None),
            ("new", now, None),
            ("expired", now, now - 1),
            ("input", 0, None),
        ):
            source = file_of(name, created_at=created_at, expires_at=expires_at)
            await store.add_file(source)
        await store.add_batch(batch_of("b", source, now))
        await store.remove_expired(0)
        assert await store.known_ids() == {"old", "new", "input", "b-o", "b-e"}
        await store.remove_expired(1000)
        assert await store.known_ids() == {"new", "input", "b-o", "b-e"}
        await store.advance("b", "failed")
        await store.remove_expired(1000)
        assert await store.known_ids() == {"new"}
        now += 2000
        assert [found.id for found in (await store.batches("", Page(9)))[0]] == ["b"]
        await store.remove_expired(1000)
        assert await store.known_ids() == set()
        assert await store.batches("", Page(9)) == ([], False)
