"""The stratified mixture-of-experts block (paper, section 3): gates, experts, norms and residuals composed.

Equations are numbered as in arXiv 2305.02176v2. `StratifiedMoE.forward` implements 4 to 7 (layer norm, gate,
experts, residual); experts.py 1 (FFN_e), gates/top_k.py 2 (the gate of a vanilla MoE), per_expert.py and
grouped.py 3 (the weighted sum), routing.py and statistics.py 8 to 11 (the balance loss).

Shapes: T tokens, D embedding, F feed-forward, E experts, K choices per token, L strata.
"""

from functools import partial
from numbers import Integral

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules import fused, inference, torch_features
from smoe_fairseq.modules.branches import (
    ConditionalRouting,
    OutputMasking,
    ResidualNetwork,
    SharedExperts,
    SimpleExperts,
    drop_gating,
    mask_outputs,
)
from smoe_fairseq.modules.config import FIRST_RESIDUAL, MoEConfig
from smoe_fairseq.modules.experts import Experts, start_pass
from smoe_fairseq.modules.gates import GATES
from smoe_fairseq.modules.gates.linear import Gate
from smoe_fairseq.modules.parallel import Placement, compute_experts
from smoe_fairseq.modules.registry import BRANCHES
from smoe_fairseq.modules.routing import Routing
from smoe_fairseq.modules.rows import IndexedTokens, MaskedTokens, like
from smoe_fairseq.modules.statistics import RoutingStats, StatsBuilder
from smoe_fairseq.modules.strata import OptionError


class StratifiedMoE(nn.Module):
    """Stratified mixture of experts, including layer norms and residuals (paper, section 3).

    With one stratum it is a pre-norm MoE sublayer (GShard with top-2, Switch with top-1).

    Args:
        embed_dim: D.
        ffn_embed_dim: F, the width of each expert unless ``expert_ffn_dim`` is set.
        strata: sizes of the strata in the paper's notation: "16" is vanilla, "4-12" has two strata.
        options: the other options of `MoEConfig`, by name.

    With ``expert_parallel``, initialise `torch.distributed` before the block is built, and make the same
    passes on every rank.

    Raises:
        OptionError: a ValueError for an invalid value or combination; it names the option.
        ValueError: ``embed_dim`` or ``ffn_embed_dim`` is below 1.
        TypeError: an option is unknown.
    """

    def __init__(
        self, embed_dim: int, ffn_embed_dim: int, strata: str = MoEConfig.strata, **options
    ):
        super().__init__()
        for name, size in (("embed_dim", embed_dim), ("ffn_embed_dim", ffn_embed_dim)):
            if not isinstance(size, Integral) or size < 1:
                raise ValueError(f"{name} {size}: expected a whole number of at least 1")
        config = MoEConfig(strata, **options)
        self.config = config
        self.strata = config.layout
        norms = StackedNorms if config.stacked else NORMS[config.norms]
        self.layer_norms = norms(embed_dim, len(self.strata), config.dropout, config.dropout_per)
        self.embed_dim = embed_dim
        self.gates = nn.ModuleList(map(self.draw_gate, range(len(self.strata))))
        self.stats_builder = StatsBuilder(config, self.gates)
        self.choices = self.stats_builder.choices  # K
        placement = self._placement(config.expert_parallel)
        expert_dim = config.expert_ffn_dim or ffn_embed_dim
        activation = config.activation_fn, config.activation_dropout
        self.experts = Experts(
            placement, embed_dim, expert_dim, *activation, config.output_init_scale
        )
        self.cmr = self.shared = self.residual = self.simple = None
        if config.copy_experts + config.constant_experts:
            self.simple = SimpleExperts(embed_dim, config.constant_experts)
        if config.cmr:
            drop = config.cmr_gate_drop
            self.cmr = ConditionalRouting(embed_dim, ffn_embed_dim, *activation, gate_drop=drop)
        if config.shared_experts:
            width = config.shared_experts * expert_dim
            self.shared = SharedExperts(embed_dim, width, *activation)
        if config.residual:
            self.residual = ResidualNetwork(embed_dim, ffn_embed_dim, *activation)
        self.extra = nn.ModuleDict(  # of plugins
            {name: BRANCHES[name](embed_dim, ffn_embed_dim, *activation) for name in config.extra}
        )
        self.masking = OutputMasking(config.fom) if config.fom else None
        extra = *self.extra.values(), self.cmr
        branches = self.simple, self.masking, self.shared, self.residual, *extra
        self.branches = tuple(branch for branch in branches if branch is not None)
        self.compute_tables()
        self.register_load_state_dict_post_hook(StratifiedMoE.compute_tables)
        self.execution = config.execution

    @property
    def kind(self) -> type[Gate]:
        """The class of its gates."""
        return GATES[self.config.gate]

    @property
    def parts(self) -> set[tuple[str, str]]:
        """Kinds and names of its registered parts."""
        return {("gate", self.config.gate), *(("branch", name) for name in self.config.extra)}

    def draw_gate(self, stratum: int) -> Gate:
        """A gate of this block with new initial weights, on torch's default device."""
        config, sizes = self.config, (self.strata.visible[stratum], self.strata.own[stratum])
        gate = GATES[config.gate](config, self.embed_dim, *sizes)
        if stratum >= FIRST_RESIDUAL.get(config.gate_residual, len(self.strata)):
            gate.add_residual()
        return gate

    def compute_tables(self, *_) -> None:
        """Computes the tables of experts on the device of the weights.

        They are not buffers: torch's moving averages would average them, and `to_empty` leave them without
        values.
        """
        options = {"dtype": torch.long, "device": self.experts.w1.device}
        self.stratum_of_expert = torch.tensor(self.strata.stratum_of_expert, **options)
        self.visible_of_gate = torch.tensor(self.strata.visible, **options)

    def _apply(self, *args, **kwargs):
        super()._apply(*args, **kwargs)
        self.compute_tables()
        return self

    def _placement(self, expert_parallel: bool) -> Placement:
        num_experts = self.strata.num_experts
        if not expert_parallel:
            return Placement(num_experts)
        try:
            return Placement.over_processes(num_experts)
        except ValueError as error:
            sizes = f"{{strata}} {self.strata} with {{expert_parallel}}"
            raise OptionError(f"{sizes}: {error}") from None

    def forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        with_stats: bool = True,
        ids: Tensor | None = None,
        gate_logits: Tensor | None = None,
    ) -> tuple[Tensor, RoutingStats | None]:
        """Route ``x`` of shape ``(..., D)``, usually ``(B, S, D)``; values at padding must be finite, too.

        Args:
            padding_mask: of shape ``x.shape[:-1]``, True at padding.
            with_stats: whether to return statistics. A decoding step is much faster without.
            ids: token ids of shape ``x.shape[:-1]``, for hash gates.
            gate_logits: with ``gate_residual="layers"``, ``gate_logits`` of the statistics of the previous
                MoE layer; None: zeros.

        Capacity is assigned sentence by sentence (first dimension), so put positions second: with
        positions first, full experts would drop the ends of the sentences.

        Raises:
            ValueError: ``x`` is no tensor, or ``padding_mask`` has another shape or type.
            RuntimeError: within `torch.jit.trace`, or a transform of `torch.func` or `torch.vmap`.

        Returns:
            ``y`` that replaces ``x`` (residual included; padding is unchanged), and the statistics; None
            without ``with_stats``, unless ``gate_residual="layers"``.
        """
        check_input(x, padding_mask)
        if self.stratum_of_expert.device != x.device:  # fully_shard moved only the weights
            self.compute_tables()
        if fused.applies(self, x):
            return fused.forward(self, x, padding_mask, with_stats)
        with_stats = with_stats or self.stats_builder.returns_gate_logits
        if not with_stats and inference.applies(self, x):
            return inference.forward(self, x, padding_mask), None
        return self._forward(x, padding_mask, with_stats, self._gate_inputs(x, ids, gate_logits))

    def _forward(
        self, x: Tensor, padding_mask: Tensor | None, with_stats: bool, extra_T: Tensor | None
    ) -> tuple[Tensor, RoutingStats | None]:
        """The general way, for all options; ``extra`` is of `_gate_inputs`."""
        x_TD, weights = x.reshape(-1, x.shape[-1]), self.experts.weights()
        run, placement = start_pass(self.execution, self.experts, weights), self.experts.placement
        # The last stratum that each token visited or skipped; -1 before the first.
        position_T = torch.full((x_TD.shape[0],), -1, device=x.device)
        padding_T = padding_mask.reshape(-1) if padding_mask is not None else position_T >= 0
        unrouted_T = drop_gating(padding_T, self.config.gating_dropout, self.training)
        position_T = position_T.masked_fill(unrouted_T, len(self.strata))
        # On other devices the host would wait for the number of tokens.
        indexes = run.on_host and x.device.type == "cpu"
        visits = []
        y_TD = self.layer_norms.start(x_TD)

        for i, (gate, own) in enumerate(zip(self.gates, self.strata.experts_of_gate, strict=True)):
            here_T = position_T == i - 1
            tokens = MaskedTokens(here_T)
            if indexes:
                tokens = IndexedTokens(here_T.nonzero().squeeze(1), len(here_T))
            # x' = LN_i(x) (paper, eq. 4)
            h_TD, y_TD = self.layer_norms.enter(i, y_TD, tokens)
            # G = softmax(W_i x'), and the top k of it (eq. 5)
            extra = () if extra_T is None else (tokens.take(extra_T),)
            routing = gate(h_TD, tokens.active_T, *extra)
            if self.config.gate_residual != "none":
                # Pad to the columns of the first gate: 0 for experts that this gate does not see.
                unseen = extra_T.shape[1] - routing.own_logits_TE.shape[1]
                extra_T = tokens.replace(extra_T, F.pad(routing.own_logits_TE, (unseen, 0)))
            # The stratum j of the first choice: the token goes on to gate j + 1.
            if i + 1 < len(self.gates):
                position_T = tokens.replace(position_T, self._stratum_of_first_choice(i, routing))
            # y = sum_e G_e FFN_e(x') (eq. 6), and the branches
            weight_TK = mask_outputs(routing.weight_TK, self.config.eom, self.training)
            copies = routing.copies(weight_TK, own, few=gate.any_number)
            branches = partial(self._compute_branches, h_TD, routing)
            result = compute_experts(placement, run, h_TD, copies, weights, branches)
            (out_TD, weights), outputs = result
            for branch, output in zip(self.branches, outputs, strict=True):
                out_TD = branch.combine(out_TD, output)
                if out_TD.shape != h_TD.shape:  # else one column would be added to all
                    shapes = f"the shape {tuple(out_TD.shape)}; expected {tuple(h_TD.shape)}"
                    raise ValueError(f"combine of the branch {type(branch).__name__} has {shapes}")
            # x <- y + x (eq. 7)
            y_TD = self.layer_norms.leave(y_TD, out_TD, tokens)
            if with_stats:
                visits.append((here_T, tokens, routing))

        y_TD = self.layer_norms.finish(x_TD, y_TD, tokens, padding_T)
        if not with_stats:
            return like(y_TD, x), None
        cmr = outputs[-1] if self.cmr is not None else None  # CMR has a single stratum
        return like(y_TD, x), self.stats_builder.stats(visits, x.shape[:-1], cmr)

    def _compute_branches(self, h_TD: Tensor, routing: Routing) -> list:
        """The outputs of the branches; they may be computed while the experts' outputs travel."""
        return [branch.compute(h_TD, routing) for branch in self.branches]

    def _gate_inputs(
        self, x: Tensor, ids: Tensor | None, gate_logits: Tensor | None
    ) -> Tensor | None:
        """Extra gate inputs: token ids or sentence indices ``(T,)``, or earlier logits ``(T, E + M)``."""
        if self.config.gate_residual != "none":
            gate = self.gates[0]
            shape = x.shape[:-1].numel(), gate.num_experts + gate.free_experts
            if gate_logits is None or not self.stats_builder.returns_gate_logits:
                return x.new_zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32))
            return gate_logits.reshape(shape)
        extra_input = self.gates[0].extra_input
        if extra_input == "id":
            if ids is None or ids.shape != x.shape[:-1]:
                raise ValueError(
                    f"gate {self.config.gate} needs ids of shape {tuple(x.shape[:-1])}"
                )
            return ids.reshape(-1)
        if extra_input == "sentence":
            *sentences, length = 1, *x.shape[:-1]
            number = torch.Size(sentences).numel()
            return torch.arange(number, device=x.device).repeat_interleave(length)
        return None

    def _stratum_of_first_choice(self, i: int, routing: Routing) -> Tensor:
        """For each token at gate ``i``, before dropping."""
        if self.strata.fixed_depth:
            return torch.full_like(routing.first_choice_T, i)
        seen = self.stratum_of_expert[self.strata.first_experts[i] :]
        return seen.index_select(0, routing.first_choice_T)  # MPS has no `take`

    @torch.no_grad()
    def end_update(self, observed_LN: Tensor | None) -> None:
        """Call it after each optimizer step; it updates gates that learn from counts.

        Args:
            observed_LN: ``observed`` of the statistics, summed over the batches of the update; None (the
                gates learn only by gradient): nothing is updated.
        """
        if observed_LN is None:
            return
        if self.gates[0].shares_counts:
            observed_LN = observed_LN.sum(0).expand_as(observed_LN)
        for gate, observed_N in zip(self.gates, observed_LN, strict=True):
            gate.update(observed_N[: gate.num_observed])


def check_input(x: Tensor, padding_mask: Tensor | None) -> None:
    """Raise as `StratifiedMoE.forward` says."""
    if not isinstance(x, Tensor):
        raise ValueError(f"x is a {type(x).__name__}: expected a tensor; a block returns a pair")
    if not torch.compiler.is_compiling():
        if torch.jit.is_tracing():
            raise RuntimeError("torch.jit.trace records the routing of one input: use torch.export")
        if torch_features.has_transform():
            raise RuntimeError(
                "torch.func and torch.vmap do not support StratifiedMoE: use autograd"
            )
    if padding_mask is not None and (
        padding_mask.shape != x.shape[:-1] or padding_mask.dtype != torch.bool
    ):
        raise ValueError(
            f"padding_mask is {padding_mask.dtype} of shape {tuple(padding_mask.shape)}: expected "
            f"torch.bool of shape {tuple(x.shape[:-1])}, True at padding"
        )


def may_have_padding(padding_mask: Tensor) -> bool:
    """Whether to apply the mask. Always True on a GPU, where reading the mask would wait for it."""
    return padding_mask.device.type != "cpu" or bool(padding_mask.any())


class PaperNorms(nn.ModuleList):
    """Layer norms and residuals of a block: one layer norm for each stratum (paper, eq. 4 and 7).

    Args:
        embed_dim: D.
        strata: number of strata.
        dropout: probability, for each stratum's output or for the sum of all outputs.
        dropout_per: "stratum" or "layer".
    """

    has_output_norm = False

    def __init__(self, embed_dim: int, strata: int, dropout: float, dropout_per: str):
        super().__init__(nn.LayerNorm(embed_dim) for _ in range(strata))
        self.dropout, self.dropout_per = dropout, dropout_per

    def start(self, x_TD: Tensor) -> Tensor:
        """The residual stream ``y`` before the first stratum."""
        return x_TD

    def enter(self, i: int, y_TD: Tensor, tokens) -> tuple[Tensor, Tensor]:
        """The normalised ``tokens`` for the gate and the experts of stratum ``i``, and ``y``."""
        return self[i](tokens.take(y_TD)), y_TD

    def leave(self, y_TD: Tensor, out_TD: Tensor, tokens) -> Tensor:
        """``y`` after a stratum, whose experts returned ``out`` for its ``tokens``."""
        dropout = self.dropout if self.dropout_per == "stratum" else 0.0
        return tokens.add(y_TD, F.dropout(out_TD, dropout, self.training))

    def finish(self, x_TD: Tensor, y_TD: Tensor, last, padding_T: Tensor) -> Tensor:
        """The block's output; ``last`` are the tokens of the last stratum."""
        if self.dropout_per == "layer" and self.training and self.dropout > 0:
            return x_TD + F.dropout(y_TD - x_TD, self.dropout, self.training)
        return y_TD


class ReleasedNorms(PaperNorms):
    """As in the paper's released code: later strata replace the residual by its norm.

    The block's output is normalised once more, even with one stratum.
    """

    has_output_norm = True

    def __init__(self, embed_dim: int, strata: int, *options):
        super().__init__(embed_dim, strata + 1, *options)

    def drop_output_norm(self) -> None:
        """Removes the output norm, which old checkpoints with one stratum do not have."""
        self.has_output_norm = False
        del self[-1]

    def enter(self, i: int, y_TD: Tensor, tokens) -> tuple[Tensor, Tensor]:
        h_TD, y_TD = super().enter(i, y_TD, tokens)
        return h_TD, y_TD if i == 0 else tokens.replace(y_TD, h_TD)

    def finish(self, x_TD: Tensor, y_TD: Tensor, last, padding_T: Tensor) -> Tensor:
        if not self.has_output_norm:
            return y_TD
        return torch.where(padding_T.unsqueeze(1), y_TD, self[-1](y_TD).to(y_TD.dtype))


class StackedNorms(PaperNorms):
    """Naive stacking: one norm before the first stratum and one residual around all."""

    def __init__(self, embed_dim: int, strata: int, *options):
        super().__init__(embed_dim, 1, *options)

    def start(self, x_TD: Tensor) -> Tensor:
        return self[0](x_TD)

    def enter(self, i: int, y_TD: Tensor, tokens) -> tuple[Tensor, Tensor]:
        return tokens.take(y_TD), y_TD

    def leave(self, y_TD: Tensor, out_TD: Tensor, tokens) -> Tensor:
        return tokens.replace(y_TD, out_TD)

    def finish(self, x_TD: Tensor, y_TD: Tensor, last, padding_T: Tensor) -> Tensor:
        # Every real token was in the last stratum.
        return last.add(x_TD, F.dropout(last.take(y_TD), self.dropout, self.training))


NORMS = {"paper": PaperNorms, "released": ReleasedNorms}
