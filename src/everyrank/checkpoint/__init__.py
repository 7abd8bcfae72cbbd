"""Saving a training, and going on from there under any layout. The format is torch.distributed.checkpoint's.

    contents.py     what is saved: tensors by name, whatever the layout; and how they are put back
    generators.py   the random generators of Python and numpy, as a tensor
    storage.py      tensors to files and back; the readers run nothing that a file asks for
    saver.py        when and how: atomic, last k and best, in the background where asked
    weights.py      the model alone: safetensors or a plain state dict, out and in

Where the files are, and which checkpoint is whole, is in `everyrank.runs`, which needs no torch.
"""

from everyrank.checkpoint.contents import aliases_of
from everyrank.checkpoint.saver import Saver, load_model, resume
from everyrank.checkpoint.storage import SaveError
from everyrank.checkpoint.weights import export, with_pretrained

__all__ = ["SaveError", "Saver", "aliases_of", "export", "load_model", "resume", "with_pretrained"]
