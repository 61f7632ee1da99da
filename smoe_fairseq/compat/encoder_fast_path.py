"""Keeps fairseq's stock encoder layer off torch's fused inference kernel.

For fairseq 0.12.2 on torch 1.13 and later. A post-norm layer that has been loaded from a checkpoint
calls ``torch._transformer_encoder_layer_fwd`` in evaluation, with the arguments of an older torch:
today a batch with padding stops with "Mask Type should be defined". Without the kernel the layer
computes the same function by its ordinary code.
"""

from types import ModuleType


def avoid_fast_path(transformer_layer: ModuleType) -> None:
    layer = transformer_layer.TransformerEncoderLayerBase
    original = layer._load_from_state_dict

    def load_from_state_dict(self, *arguments):
        original(self, *arguments)
        self.load_to_BT = False  # fairseq's own switch, which loading has just turned on

    layer._load_from_state_dict = load_from_state_dict
