"""The built-in models. Shapes: B samples, C channels, H and W pixels, T tokens, D width, V vocabulary."""

from everyrank.models.convnet import ConvNet
from everyrank.models.decoder import Decoder, DecoderShape

__all__ = ["ConvNet", "Decoder", "DecoderShape"]
