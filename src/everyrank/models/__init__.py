"""The built-in models. Shapes: B samples, C channels, H and W pixels, T tokens, D width, V vocabulary."""

from everyrank.models.convnet import ConvNet
from everyrank.models.decoder import DECODER_PLAN, Decoder, DecoderShape
from everyrank.models.resnet import RESNET_DEPTHS, ResNet

__all__ = ["DECODER_PLAN", "RESNET_DEPTHS", "ConvNet", "Decoder", "DecoderShape", "ResNet"]
