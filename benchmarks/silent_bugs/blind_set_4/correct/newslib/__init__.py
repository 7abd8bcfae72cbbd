from .data import batches
from .model import Classifier
from .parallel import broadcast_module, mean_gradients, start, stop

__all__ = ["Classifier", "batches", "broadcast_module", "mean_gradients", "start", "stop"]
