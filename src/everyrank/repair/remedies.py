"""The remedies to try for a finding of the audit, by its rule. Another audit decides which one helps.

A remedy is a function that edits a script, or raises `CannotRepairError` if it does not fit the script.
"""

from __future__ import annotations

from collections.abc import Callable

from everyrank.audit import Finding
from everyrank.repair.data_edits import (
    divide_by_sampler,
    one_seed_for_the_sampler,
    remove_rank_arguments,
    set_epoch,
    shuffle_by_the_sampler,
    split_with_fixed_seed,
)
from everyrank.repair.edited_script import EditedScript
from everyrank.repair.evaluation_edits import (
    add_up_over_ranks,
    dropout_by_mode,
    evaluate_in_eval_mode,
    evaluate_without_padding,
    keep_last_batch,
    train_in_train_mode,
    weigh_means_by_terms,
)
from everyrank.repair.gradient_edits import (
    clear_gradients,
    clear_once_an_update,
    clip_before_step,
    divide_by_micro_batches,
    divide_by_ranks,
    do_not_divide_by_ranks,
    do_not_divide_twice,
    do_not_multiply_by_ranks,
    multiply_by_ranks,
    step_of_all_micro_batches,
    unscale_before_clipping,
    weigh_by_terms,
)
from everyrank.repair.replica_edits import (
    call_the_wrapper,
    remove_wrapper_option,
    same_rate_everywhere,
    save_on_rank_0,
    seed_by_rank,
    seed_generator_by_rank,
    start_with_rank_0,
    step_schedule_once,
)

__all__ = ["REMEDIES", "Remedy", "remedies_for"]

Remedy = Callable[[EditedScript, Finding], None]

# (rule, a fragment of the finding's text, remedy): the remedies of a rule are tried in this order
REMEDIES: tuple[tuple[str, str, Remedy], ...] = (
    ("data.same", "", divide_by_sampler),
    ("data.same", "", remove_rank_arguments),
    ("data.epoch", "set_epoch is not called", set_epoch),
    ("data.epoch", "the data is not shuffled", shuffle_by_the_sampler),
    ("data.overlap", "", one_seed_for_the_sampler),
    ("data.overlap", "", remove_rank_arguments),
    ("data.skipped", "", remove_rank_arguments),
    ("data.split", "", split_with_fixed_seed),
    ("gradient.carried", "", clear_gradients),
    ("gradient.thrown-away", "", clear_once_an_update),
    ("gradient.scale", "ranks once too often", do_not_divide_by_ranks),
    ("gradient.scale", "ranks once too often", multiply_by_ranks),
    ("gradient.scale", "multiplied by the", do_not_multiply_by_ranks),
    ("gradient.scale", "multiplied by the", divide_by_ranks),
    ("gradient.scale", "summed over the", do_not_multiply_by_ranks),
    ("gradient.scale", "summed over the", divide_by_ranks),
    ("gradient.scale", "not divided by the", divide_by_micro_batches),
    ("gradient.scale", "backwards twice", do_not_divide_twice),
    ("gradient.ragged", "", weigh_by_terms),
    ("gradient.weights", "", step_of_all_micro_batches),
    ("gradient.local", "", step_of_all_micro_batches),
    ("clip.scaled", "", unscale_before_clipping),
    ("clip.local", "", clip_before_step),
    ("replicas.unwrapped", "", call_the_wrapper),
    ("replicas.drift", "seeds here", start_with_rank_0),
    ("replicas.drift", "no torch.manual_seed before", start_with_rank_0),
    ("random.dropout", "", seed_by_rank),
    ("random.noise", "", seed_generator_by_rank),
    ("random.noise", "", seed_by_rank),
    ("random.augment", "", seed_generator_by_rank),
    ("random.augment", "", seed_by_rank),
    ("schedule.often", "", step_schedule_once),
    ("schedule.differs", "", same_rate_everywhere),
    ("eval.shard", "", add_up_over_ranks),
    ("eval.mean-of-means", "", weigh_means_by_terms),
    ("eval.padded", "", evaluate_without_padding),
    ("eval.dropped", "", keep_last_batch),
    ("eval.mode", "", evaluate_in_eval_mode),
    ("eval.dropout", "", dropout_by_mode),
    ("train.mode", "", train_in_train_mode),
    ("save.race", "", save_on_rank_0),
    ("ddp.find-unused", "", remove_wrapper_option),
    ("ddp.buckets", "", remove_wrapper_option),
)


def remedies_for(finding: Finding) -> list[Remedy]:
    """Return the remedies to try for a finding, in order."""
    return [remedy for rule, fragment, remedy in REMEDIES if rule == finding.rule and fragment in finding.text]
