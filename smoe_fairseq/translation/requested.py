"""The requested capacity of translated tokens, from one more pass over them.

Shapes: B sentences, S source positions, T target positions, N blocks.
"""

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from smoe_fairseq.models.smoe_transformer import SMoETransformerModel


@torch.inference_mode()
def requested_capacity(
    model: SMoETransformerModel, source_BS: Tensor, given: list[Tensor], padding: int
) -> tuple[Tensor | None, Tensor | None]:
    """Strata that each token stopped at, means over the MoE layers of a side, ``(B, S)`` and ``(B, T)``.

    Args:
        given: what the decoder is given for each sentence, its first token included.

    Returns:
        None for a side without MoE layers.
    """
    given_BT = pad_sequence(given, batch_first=True, padding_value=padding)
    encoder_out = model.encoder(source_BS)
    _, extra = model.decoder.extract_features(given_BT, encoder_out)
    sides = {"encoder": [], "decoder": []}
    for name, stats in zip(extra["moe_layers"], extra["moe_stats"], strict=True):
        sides[name.split(".")[0]].append(stats.requested_capacity)
    of_encoder, of_decoder = (
        torch.stack(found).float().mean(0) if found else None for found in sides.values()
    )
    return of_encoder, of_decoder
