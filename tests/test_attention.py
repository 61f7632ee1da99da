"""Torch's fused attention in place of fairseq's: same outputs, same gradients."""

import pytest
import torch
from fairseq.modules import MultiheadAttention

from smoe_fairseq.models.attention import Attention, attention_mask

B, T, S, D = 3, 4, 5, 16


@pytest.mark.parametrize("kind", ["padding", "future", "both", "none", "source"])
def test_as_fairseqs(kind):
    torch.manual_seed(0)
    of_self = kind != "source"
    options = {"self_attention": True} if of_self else {"encoder_decoder_attention": True}
    ours, theirs = Attention(D, 2, **options), MultiheadAttention(D, 2, **options)
    theirs.load_state_dict(ours.state_dict())
    keys = T if of_self else S
    padding = future = None
    if kind in ("padding", "both", "source"):
        padding = torch.zeros(B, keys, dtype=torch.bool)
        padding[1, -2:] = True
    if kind in ("future", "both"):
        future = torch.ones(T, keys, dtype=torch.bool).triu(1)
    mask = attention_mask(padding, future, torch.float32)
    assert (mask is None) == (kind == "none")
    results = []
    for attention in (ours, theirs):
        x = torch.randn(T, B, D, generator=torch.Generator().manual_seed(1)).requires_grad_()
        source = x
        if not of_self:
            source = torch.randn(S, B, D, generator=torch.Generator().manual_seed(2))
            source.requires_grad_()
        if attention is ours:
            y, weights = attention(x, source, source, need_weights=False, attn_mask=mask)
            assert weights is None
        else:
            added = None if future is None else torch.zeros(T, T).masked_fill(future, -torch.inf)
            y, _ = attention(x, source, source, padding, attn_mask=added, static_kv=not of_self)
        inputs = [x, *attention.parameters()] + ([] if of_self else [source])
        direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
        results.append([y, *torch.autograd.grad(y, inputs, direction)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert list(ours.state_dict()) == list(theirs.state_dict())


def test_dropout_is_retained_where_fairseq_is_told_to():
    """By --retain-dropout, which its dropout module knows."""
    attention = Attention(D, 2, dropout=0.5, self_attention=True).eval()
    x = torch.randn(T, B, D)
    outputs = [attention(x, x, x, need_weights=False)[0] for _ in range(2)]
    assert torch.equal(*outputs)
    attention.dropout_module.make_generation_fast_("", retain_dropout=True)
    outputs = [attention(x, x, x, need_weights=False)[0] for _ in range(2)]
    assert not torch.equal(*outputs)


def test_cudnn_which_plans_for_each_shape_is_left_out_here_alone(monkeypatch):
    seen, attend = [], torch.nn.functional.scaled_dot_product_attention

    def noting(*arguments, **options):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", noting)
    x = torch.randn(T, B, D, device="meta")
    for enabled in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(enabled)
        Attention(D, 2, self_attention=True).to("meta")(x, x, x, need_weights=False)
        assert torch.backends.cuda.cudnn_sdp_enabled() == enabled
    assert seen == [False, False]
    torch.backends.cuda.enable_cudnn_sdp(True)
