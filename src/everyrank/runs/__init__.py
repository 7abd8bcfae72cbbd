"""The folder of a run: its files, and its newest, best and complete checkpoints. Imports no torch.

    runs/digits-ddp-.../
        log.jsonl, log.csv, events.jsonl, epochs.csv, memberships.jsonl, resources.csv, record.json, ranks/
        everyrank.lock              during a run: the process that uses the folder
        checkpoints/
            step-00000046/          a whole checkpoint: it got this name when it was complete
                about.json          metadata, size and CRC of every other file, and its own CRC
                training.pt         schedule, loss scale, groups of the optimizer
                .metadata, *.distcp torch.distributed.checkpoint: tensors of model, optimizer and random generators
            step-00000069.tmp/      being written, or left by a crash; never read, removed by the next run
            step-00000092.damaged/  renamed, because the training resumed from an earlier one
            best -> step-00000046

metadata.py  CheckpointMetadata: the content of about.json; checks for damage
folder.py   finds, commits and removes checkpoints; only complete ones have final names
lock.py     one run at a time
save_interval.py  how long to train between two checkpoints
"""

from everyrank.runs.folder import (
    add_metrics,
    all_of,
    best_of,
    checkpoint_named,
    checkpoints_of,
    clear_unfinished,
    commit,
    discard,
    find_checkpoint,
    is_better,
    mark_best,
    new_folder,
    newest_whole,
    refuse_damaged,
    remove_old_checkpoints,
    require_whole,
    run_of,
    score_of,
    set_aside_newer,
)
from everyrank.runs.lock import hold
from everyrank.runs.metadata import (
    LENGTHS,
    Checkpoint,
    CheckpointMetadata,
    changed_lengths,
    check_metadata,
    crc_of,
    damage,
    fields_of,
    json_form,
    open_file,
    write_metadata,
)
from everyrank.runs.save_interval import optimal_interval_seconds

__all__ = [
    "LENGTHS",
    "Checkpoint",
    "CheckpointMetadata",
    "add_metrics",
    "all_of",
    "best_of",
    "changed_lengths",
    "check_metadata",
    "checkpoint_named",
    "checkpoints_of",
    "clear_unfinished",
    "commit",
    "crc_of",
    "damage",
    "discard",
    "fields_of",
    "find_checkpoint",
    "hold",
    "is_better",
    "json_form",
    "mark_best",
    "new_folder",
    "newest_whole",
    "open_file",
    "optimal_interval_seconds",
    "refuse_damaged",
    "remove_old_checkpoints",
    "require_whole",
    "run_of",
    "score_of",
    "set_aside_newer",
    "write_metadata",
]
