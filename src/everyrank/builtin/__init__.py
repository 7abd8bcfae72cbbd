"""The built-in models and workloads, each in one file, as a user would write it.

The names of the workloads are in `workload.find.BUILT_IN`. Shapes: B samples, C channels, H and W pixels, T tokens,
D width, V vocabulary.
"""

from everyrank.builtin.convnet import ConvNet
from everyrank.builtin.decoder import DECODER_EXPERTS, DECODER_PLAN, Decoder, DecoderShape, decoder_plan
from everyrank.builtin.resnet import RESNET_DEPTHS, ResNet

__all__ = [
    "DECODER_EXPERTS",
    "DECODER_PLAN",
    "RESNET_DEPTHS",
    "ConvNet",
    "Decoder",
    "DecoderShape",
    "ResNet",
    "decoder_plan",
]
