"""Datasets out of files as people have them: images, text, tables, and files of many samples each.

arrays.py       images that fit in memory, as one tensor
idx.py          MNIST's files, gzip or not
cifar.py        the binary and the pickled files; the pickles through a reader that builds arrays and nothing else
folder.py       a folder of classes of images: JPEG, PNG, WebP
shards.py       lines of text, JSONL, tar files in the WebDataset layout
text.py         text of any files, as bytes in windows
table.py        Parquet, and rows of the `datasets` library
download.py     what may be fetched, with its checksum
transforms.py   augmentation, whose randomness is a function of (seed, epoch, sample) through the loader

Each can be used from a user's own workload file.
"""

from everyrank.datasets.arrays import Images
from everyrank.datasets.cifar import read_cifar
from everyrank.datasets.folder import ImageFolder
from everyrank.datasets.idx import read_idx, read_mnist
from everyrank.datasets.shards import JsonLines, TarShards, TextLines, files_in
from everyrank.datasets.table import ParquetRows, Rows
from everyrank.datasets.text import TextWindows

__all__ = [
    "ImageFolder",
    "Images",
    "JsonLines",
    "ParquetRows",
    "Rows",
    "TarShards",
    "TextLines",
    "TextWindows",
    "files_in",
    "read_cifar",
    "read_idx",
    "read_mnist",
]
