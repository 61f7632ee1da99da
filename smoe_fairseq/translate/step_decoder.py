"""The decoder of a `SMoETransformerModel` for single steps of a beam search.

fairseq's decoder copies the keys and values of all hypotheses whenever the beam is reordered, and stores
those of the source for each hypothesis. Here all stay in place, and those of the source are stored once per
sentence: a mask selects the keys of a hypothesis's own past.

Shapes: B sentences, W hypotheses of each, R = B W rows, S source positions, N keys of a sentence so far, D
embedding, H heads.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from smoe_fairseq.modules import RoutingStats
from smoe_fairseq.modules.torch_features import attend
from smoe_fairseq.translate.packed import concatenate

_MASKED = float("-inf")
_KEYS = 16  # on a CPU, torch's attention is slower for other numbers of keys than multiples of this


class StepDecoder:
    """The state of one batch.

    Args:
        decoder: a `SMoETransformerDecoder` in evaluation mode.
        encoder_out: the encoder's output for the batch.
    """

    def __init__(self, decoder, encoder_out: dict):
        self.decoder = decoder
        source_BSD = encoder_out["encoder_out"][0].transpose(0, 1)
        mask_BS = encoder_out["encoder_padding_mask"][0]
        more = -mask_BS.shape[1] % _KEYS
        source_BSD = F.pad(source_BSD, (0, 0, 0, more))
        mask_BS = F.pad(mask_BS, (0, more), value=True)
        zeros_BS = torch.zeros(mask_BS.shape, dtype=source_BSD.dtype, device=mask_BS.device)
        self.source_bias_B1S = zeros_BS.masked_fill(mask_BS, _MASKED).unsqueeze(1)
        self.bias_BWN: Tensor | None = None
        self.layers = [_Layer(layer, source_BSD) for layer in decoder.layers]

    def features(self, tokens_RT: Tensor, beam: int) -> Tensor:
        """The decoder's output at the last token, ``(R, D)``, before the output projection.

        Args:
            tokens_RT: of W = ``beam`` hypotheses per sentence, sentence by sentence. Each call has one more
                token than the previous one.
        """
        own_WW = torch.full((beam, beam), _MASKED, device=tokens_RT.device).fill_diagonal_(0)
        own_WW = own_WW.to(self.source_bias_B1S.dtype)
        own_BWW = own_WW.expand(len(self.source_bias_B1S), -1, -1)
        past = [] if self.bias_BWN is None else [self.bias_BWN]
        self.bias_BWN = torch.cat([*past, own_BWW], dim=2)
        x_1RD = self.decoder.embed(tokens_RT, {})
        ids_R1, gate_logits = tokens_RT[:, -1:], None
        source_bias_BWS = self.source_bias_B1S.expand(-1, beam, -1)
        bias_BWN = F.pad(self.bias_BWN, (0, -self.bias_BWN.shape[2] % _KEYS), value=_MASKED)
        biases = bias_BWN.unsqueeze(1), source_bias_BWS.unsqueeze(1)
        for layer in self.layers:
            x_1RD, *stats = layer.step(x_1RD, ids_R1, *biases, gate_logits)
            if stats:
                gate_logits = RoutingStats(*stats).gate_logits
        if self.decoder.layer_norm is not None:
            x_1RD = self.decoder.layer_norm(x_1RD)
        return x_1RD.squeeze(0)

    def reorder(self, parent_BW: Tensor) -> None:
        """Let hypothesis w continue hypothesis ``parent_BW[b, w]`` of its sentence."""
        index_BWN = parent_BW.unsqueeze(2).expand(-1, -1, self.bias_BWN.shape[2])
        self.bias_BWN = self.bias_BWN.gather(1, index_BWN)

    def keep(self, indices: list[int]) -> None:
        """Keep only these sentences, in this order; fast if most keep their indices."""
        self.bias_BWN = select_in_place(self.bias_BWN, indices)
        self.source_bias_B1S = select_in_place(self.source_bias_B1S, indices)
        for layer in self.layers:
            layer.keep(indices)


def select_in_place(x: Tensor, indices: list[int], dim: int = 0) -> Tensor:
    """``x.index_select(dim, indices)`` in the memory of ``x``; only rows with new indices are copied."""
    x_B = x.movedim(dim, 0)
    to = [i for i, index in enumerate(indices) if i != index]
    if to:
        x_B[to] = x_B[[indices[i] for i in to]]
    return x.narrow(dim, 0, len(indices))


class _Layer:
    """One layer and its keys and values ``(2, B, H, ..., D / H)``."""

    def __init__(self, layer, source_BSD: Tensor):
        self.layer = layer
        own, source = layer.self_attn, layer.encoder_attn
        self.heads = own.num_heads
        self.project = getattr(own, "qkv", None)  # of a model in int8
        if self.project is None:
            weight, bias = concatenate((own.q_proj, own.k_proj, own.v_proj))
            self.project = partial(F.linear, weight=weight, bias=bias)
        keys_values = source.k_proj(source_BSD), source.v_proj(source_BSD)
        self.source_memory = self._by_head(torch.stack(keys_values)).contiguous()
        self.memory: Tensor | None = None  # of the hypotheses, allocated for more than N keys
        self.number = 0  # N

    def step(
        self,
        x_1RD: Tensor,
        ids_R1: Tensor,
        bias_B1WN: Tensor,
        source_bias_B1WS: Tensor,
        gate_logits: Tensor | None,
    ) -> tuple[Tensor, ...]:
        """The result of `TransformerLayer.feed_forward`, for one new token of each hypothesis."""
        batch, _, beam, keys = bias_B1WN.shape

        def self_attention(h_1RD):
            qkv_3BWD = self.project(h_1RD).view(batch, beam, 3, -1).permute(2, 0, 1, 3)
            self._append(self._by_head(qkv_3BWD[1:]))
            memory = self.memory.narrow(3, 0, keys)
            return self._attend(self.layer.self_attn, qkv_3BWD[0], memory, bias_B1WN)

        def source_attention(h_1RD):
            attention = self.layer.encoder_attn
            q = attention.q_proj(h_1RD).view(batch, beam, -1)
            return self._attend(attention, q, self.source_memory, source_bias_B1WS)

        layer = self.layer
        x_1RD = layer.sublayer(x_1RD, layer.self_attn_layer_norm, self_attention)
        x_1RD = layer.sublayer(x_1RD, layer.encoder_attn_layer_norm, source_attention)
        x_R1D = x_1RD.transpose(0, 1)
        y_R1D, *stats = layer.feed_forward(x_R1D, None, ids_R1, gate_logits, with_stats=False)
        return y_R1D.transpose(0, 1), *stats

    def keep(self, indices: list[int]) -> None:
        self.source_memory = select_in_place(self.source_memory, indices, 1)
        self.memory = select_in_place(self.memory, indices, 1)

    def _attend(self, attention, q_BWD: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        y_BHWd = attend(self._by_head(q_BWD), *memory, bias)
        return attention.out_proj(y_BHWd.transpose(1, 2).reshape(1, -1, q_BWD.shape[2]))

    def _by_head(self, x_BWD: Tensor) -> Tensor:
        return x_BWD.view(*x_BWD.shape[:-1], self.heads, -1).transpose(-3, -2)

    def _append(self, more: Tensor) -> None:
        number = more.shape[3]
        end = self.number + number
        if self.memory is None or end > self.memory.shape[3]:
            space = end + max(self.number, _KEYS * number)
            space += -space % _KEYS
            larger = more.new_zeros(*more.shape[:3], space, more.shape[4])
            if self.memory is not None:
                larger[:, :, :, : self.number] = self.memory[:, :, :, : self.number]
            self.memory = larger
        self.memory.narrow(3, self.number, number).copy_(more)
        self.number = end
