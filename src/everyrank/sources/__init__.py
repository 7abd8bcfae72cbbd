"""Datasets out of files as people have them: MNIST's idx, both kinds of CIFAR, folders of images, .npz.

arrays.py       images that fit in memory, as one tensor
idx.py          MNIST's files, gzip or not
cifar.py        the binary and the pickled files; the pickles through a reader that builds arrays and nothing else
folder.py       a folder of classes of images: JPEG, PNG, WebP
transforms.py   augmentation, whose randomness is a function of (seed, epoch, sample) through the loader

Each can be used from a person's own workload file. Nothing here is fetched from a network.
"""

from everyrank.sources.arrays import Images
from everyrank.sources.cifar import read_cifar
from everyrank.sources.folder import ImageFolder
from everyrank.sources.idx import read_idx, read_mnist

__all__ = ["ImageFolder", "Images", "read_cifar", "read_idx", "read_mnist"]
