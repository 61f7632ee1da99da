"""The position in an epoch, when a run resumes on another number of ranks."""

import functools
from types import ModuleType

from smoe_fairseq.errors import UsageError

RANKS, BATCHES = "ranks", "batches"  # keys beside fairseq's own


def resume_on_any_ranks(iterators: ModuleType) -> None:
    """Make fairseq's epoch iterators save and load the position in batches of all ranks.

    fairseq counts the batches of each rank, so on another number of ranks it would repeat or leave out a
    part of the epoch. If the epoch has another number of batches now, since they are of another size, the
    position is the same share of them.
    """
    epochs, grouped = iterators.EpochBatchIterator, iterators.GroupedEpochBatchIterator
    save, load = epochs.state_dict, epochs.load_state_dict

    @functools.wraps(save)
    def state_dict(self):
        if isinstance(self, grouped):  # of several data sets, which fairseq's speech tasks have
            return save(self)
        return {**save(self), RANKS: self.num_shards, BATCHES: len(self.frozen_batches)}

    @functools.wraps(load)
    def load_state_dict(self, state):
        position = state.get("iterations_in_epoch", 0)
        if position and RANKS in state:  # earlier checkpoints lack it
            self.epoch = state["epoch"]
            now = len(self.frozen_batches)
            if (self.num_shards, now) != (state[RANKS], state[BATCHES]):
                done = position * state[RANKS] * now // state[BATCHES]
                state = {**state, "iterations_in_epoch": min(done, now - 1) // self.num_shards}
        try:
            load(self, state)
        except RuntimeError:
            raise UsageError(
                f"the checkpoint was saved behind batch {position} of its epoch, which the data do not have "
                "now: expected the data and batch size of its training, or --reset-dataloader"
            ) from None

    epochs.state_dict, epochs.load_state_dict = state_dict, load_state_dict
