"""The decoder of a `SMoETransformerModel`, one step of a beam search after the other.

fairseq's way through the layers copies the keys and values of all hypotheses whenever they change places, and
those of the source for each of them. Here both lie still, once per sentence: a mask tells a hypothesis which
of its sentence's keys are its own past.

Shapes: B sentences, W hypotheses of each, R = B W rows, S source positions, N keys of a sentence so far, D
embedding, H heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_HIDDEN = float("-inf")
_FEW = 16  # numbers of which torch's softmax takes longer than of more, on a CPU


class StepDecoder:
    """The state of one batch.

    Args:
        decoder: a `SMoETransformerDecoder` in evaluation mode.
        encoder_out: of its sentences, in the encoder's form.
    """

    def __init__(self, decoder, encoder_out: dict):
        self.decoder = decoder
        source_BSD = encoder_out["encoder_out"][0].transpose(0, 1)
        mask_BS = encoder_out["encoder_padding_mask"][0]
        if (more := _FEW - mask_BS.shape[1]) > 0:
            source_BSD = F.pad(source_BSD, (0, 0, 0, more))
            mask_BS = F.pad(mask_BS, (0, more), value=True)
        zeros_BS = torch.zeros(mask_BS.shape, dtype=source_BSD.dtype, device=mask_BS.device)
        self.source_bias_B1S = zeros_BS.masked_fill(mask_BS, _HIDDEN).unsqueeze(1)
        self.bias_BWN = None  # before the first step
        self.layers = [_Layer(layer, source_BSD) for layer in decoder.layers]

    def features(self, tokens_RT: Tensor, beam: int) -> Tensor:
        """What the last of the tokens gives, ``(R, D)``: the next one's logits are a product away.

        Args:
            tokens_RT: of W = ``beam`` hypotheses per sentence, sentence after sentence. Each call has one
                more token than the one before.
        """
        own_WW = torch.full((beam, beam), _HIDDEN, device=tokens_RT.device).fill_diagonal_(0)
        own_WW = own_WW.to(self.source_bias_B1S.dtype)
        own_BWW = own_WW.expand(len(self.source_bias_B1S), -1, -1)
        past = [] if self.bias_BWN is None else [self.bias_BWN]
        self.bias_BWN = torch.cat([*past, own_BWW], dim=2)
        x_1RD = self.decoder.embed(tokens_RT, {})
        ids_R1 = tokens_RT[:, -1:]
        for layer in self.layers:
            x_1RD = layer.step(x_1RD, ids_R1, self.bias_BWN, self.source_bias_B1S)
        if self.decoder.layer_norm is not None:
            x_1RD = self.decoder.layer_norm(x_1RD)
        return x_1RD.squeeze(0)

    def follow(self, parent_BW: Tensor) -> None:
        """Hypothesis w goes on from what was hypothesis ``parent_BW[b, w]`` of its sentence."""
        index_BWN = parent_BW.unsqueeze(2).expand(-1, -1, self.bias_BWN.shape[2])
        self.bias_BWN = self.bias_BWN.gather(1, index_BWN)

    def keep(self, places: list[int]) -> None:
        """Goes on with the sentences of these places alone; most should be where they are to be."""
        self.bias_BWN = moved_up(self.bias_BWN, places)
        self.source_bias_B1S = moved_up(self.source_bias_B1S, places)
        for layer in self.layers:
            layer.keep(places)


def moved_up(x_B: Tensor, places: list[int]) -> Tensor:
    """``x[places]`` in the memory of ``x``, of which little is moved."""
    to = [i for i, place in enumerate(places) if i != place]
    if to:
        x_B[to] = x_B[[places[i] for i in to]]
    return x_B[: len(places)]


class _Layer:
    """One layer and what it keeps of the sentences: keys and values ``(B, H, ..., D / H)``."""

    def __init__(self, layer, source_BSD: Tensor):
        self.layer = layer
        own, source = layer.self_attn, layer.encoder_attn
        self.heads = own.num_heads
        projections = (own.q_proj, own.k_proj, own.v_proj)
        self.weight = torch.cat([p.weight for p in projections])
        self.bias = torch.cat([p.bias for p in projections])
        self.source_keys = self._by_head(source.k_proj(source_BSD)).contiguous()
        self.source_values = self._by_head(source.v_proj(source_BSD)).contiguous()
        self.keys = self.values = None  # with room for more steps
        self.number = 0  # N

    def step(self, x_1RD: Tensor, ids_R1: Tensor, bias_BWN: Tensor, source_bias_B1S: Tensor):
        """The layer's output for one new token of each hypothesis."""
        batch, beam, _ = bias_BWN.shape

        def self_attention(h_1RD):
            q, k, v = F.linear(h_1RD, self.weight, self.bias).view(batch, beam, -1).chunk(3, dim=2)
            self._append(self._by_head(k), self._by_head(v))
            keys, values = (cache[:, :, : self.number] for cache in (self.keys, self.values))
            return self._attend(self.layer.self_attn, q, keys, values, bias_BWN)

        def source_attention(h_1RD):
            attention = self.layer.encoder_attn
            q = attention.q_proj(h_1RD).view(batch, beam, -1)
            return self._attend(attention, q, self.source_keys, self.source_values, source_bias_B1S)

        layer = self.layer
        x_1RD = layer.sublayer(x_1RD, layer.self_attn_layer_norm, self_attention)
        x_1RD = layer.sublayer(x_1RD, layer.encoder_attn_layer_norm, source_attention)
        return layer.feed_forward(x_1RD, None, ids_R1, with_stats=False)[0]

    def keep(self, places: list[int]) -> None:
        self.source_keys = moved_up(self.source_keys, places)
        self.source_values = moved_up(self.source_values, places)
        self.keys, self.values = moved_up(self.keys, places), moved_up(self.values, places)

    def _attend(self, attention, q_BWD, keys_BHNd, values_BHNd, bias) -> Tensor:
        q_BHWd = self._by_head(q_BWD * attention.scaling)
        weights_BHWN = (q_BHWd @ keys_BHNd.transpose(2, 3)).add_(bias.unsqueeze(1))
        weights_BHWN = weights_BHWN.softmax(dim=-1, dtype=torch.float32).to(q_BWD.dtype)
        y_BWHd = (weights_BHWN @ values_BHNd).transpose(1, 2)
        return attention.out_proj(y_BWHd.reshape(1, -1, q_BWD.shape[2]))

    def _by_head(self, x_BWD: Tensor) -> Tensor:
        return x_BWD.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def _append(self, keys: Tensor, values: Tensor) -> None:
        more = keys.shape[2]
        end = self.number + more
        if self.keys is None or end > self.keys.shape[2]:
            shape = (*keys.shape[:2], end + max(self.number, 16 * more), keys.shape[3])
            for name in ("keys", "values"):
                old, room = getattr(self, name), keys.new_empty(shape)
                if old is not None:
                    room[:, :, : self.number] = old[:, :, : self.number]
                setattr(self, name, room)
        self.keys[:, :, self.number : end] = keys
        self.values[:, :, self.number : end] = values
        self.number = end
