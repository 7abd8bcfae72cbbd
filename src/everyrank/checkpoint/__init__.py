"""Saves and resumes a training under any layout, in the format of torch.distributed.checkpoint.

    contents.py     the tensors and values of a checkpoint, independent of the layout, and how to load them
    generators.py   the random generators of Python and numpy, as a tensor
    storage.py      writes and reads tensors; the readers run no code from a file
    state_entries.py    entries of a state dict that are copies, and modules that load more than tensors
    saver.py        Saver: atomic saves, the last k and the best, optionally in the background
    weights.py      exports and loads model weights: safetensors or a plain state dict

`everyrank.runs`, which needs no torch, finds the files and complete checkpoints.
"""

from everyrank.checkpoint.contents import aliases_of
from everyrank.checkpoint.saver import Saver, load_model, resume
from everyrank.checkpoint.storage import SaveError
from everyrank.checkpoint.weights import export, with_pretrained

__all__ = ["SaveError", "Saver", "aliases_of", "export", "load_model", "resume", "with_pretrained"]
