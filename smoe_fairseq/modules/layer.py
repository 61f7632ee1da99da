"""The stratified mixture-of-experts block: strata, gates, dispatcher and experts composed.

Shapes: T tokens, D embedding, F feed-forward, E experts, M null experts, K choices per token, L strata.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from smoe_fairseq.modules.branches import (
    ConditionalRouting,
    ResidualNetwork,
    SharedExperts,
    SimpleExperts,
    drop_gating,
    mask_outputs,
)
from smoe_fairseq.modules.config import MoEConfig
from smoe_fairseq.modules.experts import (
    Experts,
    Grouped,
    PerExpert,
    Placement,
    start_pass,
)
from smoe_fairseq.modules.gates import GATES
from smoe_fairseq.modules.norms import PaperNorms, ReleasedNorms, StackedNorms
from smoe_fairseq.modules.option_error import OptionError
from smoe_fairseq.modules.parallel import LocalDispatcher, ShardedDispatcher
from smoe_fairseq.modules.routing import Routing
from smoe_fairseq.modules.statistics import Counting, RoutingStats, on_all_experts

NORMS = {"paper": PaperNorms, "released": ReleasedNorms}


class StratifiedMoE(nn.Module):
    """Stratified mixture of experts, its layer norms and residuals inside (paper, section 3).

    One stratum is a pre-norm MoE sublayer (GShard with top-2, Switch with top-1).

    Args:
        embed_dim: D.
        ffn_embed_dim: F, the width of each expert unless ``expert_ffn_dim`` says otherwise.
        strata: sizes of the strata in the paper's notation: "16" is vanilla, "4-12" has two.
        options: the other options of `MoEConfig`, by name.

    With ``expert_parallel`` the default process group of `torch.distributed` has to be there before the
    block, and every rank has to make the same passes.

    Raises:
        OptionError: a ValueError, for a value that the block cannot take; it names the option.
        TypeError: an option that there is not.
    """

    def __init__(
        self, embed_dim: int, ffn_embed_dim: int, strata: str = MoEConfig.strata, **options
    ):
        super().__init__()
        config = MoEConfig(strata, **options)
        self.config = config
        self.strata = config.layout
        self.learns_balance = config.learns_balance
        self.balance, self.balance_over = config.balance, config.balance_over
        self.capacity_budget = config.capacity_budget
        self.eom, self.fom, self.gating_dropout = config.eom, config.fom, config.gating_dropout
        norms = StackedNorms if config.stacked else NORMS[config.norms]
        self.layer_norms = norms(embed_dim, len(self.strata), config.dropout, config.dropout_per)
        self.gates = nn.ModuleList(
            GATES[config.gate].of_config(config, embed_dim, num_visible, own)
            for num_visible, own in zip(self.strata.visible, self.strata.own, strict=True)
        )
        self.choices = max(gate.top_k for gate in self.gates)  # K
        self.counting = Counting(
            self.strata,
            self.choices,
            config.null_experts,
            config.copy_experts,
            config.constant_experts,
            observed=max(gate.observes for gate in self.gates),
            entropy=config.gate == "top-p",
            mean_probs=config.balance_over == "update",
            stops=config.capacity_budget > 0,
            l1=config.gate == "relu",
        )
        place = self._placement(config.expert_parallel)
        expert_dim = config.expert_ffn_dim or ffn_embed_dim
        activation = config.activation_fn, config.activation_dropout
        self.experts = Experts(place, embed_dim, expert_dim, *activation, config.output_init_scale)
        self.dispatcher = (
            ShardedDispatcher(place) if place.is_sharded else LocalDispatcher(place.num_experts)
        )
        self.cmr = self.shared = self.residual = self.simple = None
        if config.copy_experts + config.constant_experts:
            self.simple = SimpleExperts(embed_dim, config.constant_experts)
        if config.cmr:
            self.cmr = ConditionalRouting(
                embed_dim, ffn_embed_dim, *activation, config.cmr_gate_drop
            )
        if config.shared_experts:
            width = config.shared_experts * expert_dim
            self.shared = SharedExperts(embed_dim, width, *activation)
        if config.residual:
            self.residual = ResidualNetwork(embed_dim, ffn_embed_dim, *activation)
        self.register_buffer(
            "stratum_of_expert", torch.tensor(self.strata.stratum_of_expert), persistent=False
        )
        self.register_buffer(
            "visible_of_gate", torch.tensor(self.strata.visible), persistent=False
        )  # experts that each sees
        self.execution = config.execution

    def _placement(self, expert_parallel: bool) -> Placement:
        num_experts = self.strata.num_experts
        if not expert_parallel:
            return Placement(num_experts)
        try:
            return Placement.over_processes(num_experts)
        except ValueError as error:
            raise OptionError(
                "{strata} {sizes} with {expert_parallel}: {reason}", sizes=self.strata, reason=error
            ) from None

    def forward(
        self,
        x: Tensor,
        padding_mask: Tensor | None = None,
        with_stats: bool = True,
        ids: Tensor | None = None,
    ) -> tuple[Tensor, RoutingStats | None]:
        """``x`` of shape ``(..., D)``, ``padding_mask`` of ``x.shape[:-1]`` (True: padding).

        All of ``x`` is finite, where it is padding too. ``ids``, also of ``x.shape[:-1]``, are the tokens'
        ids, which only a hash gate asks for.

        Sentences go along the first dimension and positions along the second, ``(B, S, D)``: capacity
        is given row by row, and where it follows the position the ends of the sentences lose theirs.

        Raises:
            ValueError: ``padding_mask`` is of another shape or type.

        Returns:
            ``y`` that takes the place of ``x`` (residual included; padding passes unchanged), and the
            statistics; None without ``with_stats``, which saves a decoding step a third of what it does
            beside the experts' products.
        """
        if padding_mask is not None and (
            padding_mask.shape != x.shape[:-1] or padding_mask.dtype != torch.bool
        ):
            raise ValueError(
                f"padding_mask is {padding_mask.dtype} of shape {tuple(padding_mask.shape)}: expected "
                f"torch.bool of shape {tuple(x.shape[:-1])}, True at padding"
            )
        x_TD = x.reshape(-1, x.shape[-1])
        run = start_pass(self.execution, self.experts, x)
        position_T = torch.zeros(x_TD.shape[0], dtype=torch.long, device=x.device)
        padding_T = padding_mask.reshape(-1) if padding_mask is not None else position_T > 0
        left_out_T = drop_gating(padding_T, self.gating_dropout, self.training)
        position_T = position_T.masked_fill(left_out_T, len(self.strata))
        requested_T = torch.zeros_like(position_T)
        dropped_TK = requested_T.unsqueeze(1).repeat(1, self.choices)
        label_T = self._labels(x, ids)
        y_TD = self.layer_norms.start(x_TD)
        routings, cmr_stats = [], None

        for i, gate in enumerate(self.gates):
            here_T = position_T == i
            tokens = run.tokens(here_T)
            h_TD, y_TD = self.layer_norms.enter(i, y_TD, tokens)
            labels = () if label_T is None else (tokens.take(label_T),)
            routing = gate(h_TD, tokens.active_T, *labels)
            position_T = tokens.replace(position_T, self._next_stratum(i, routing))
            if i + 1 < len(self.gates):
                run.announce(position_T == i + 1)
            mixed = self._mix_experts(i, h_TD, routing, run)
            if self.cmr is None:
                out_TD = mixed()
            else:
                out_TD, cmr_stats = self.cmr(h_TD, mixed, tokens.active_T)
            y_TD = self.layer_norms.leave(y_TD, out_TD, tokens)
            if with_stats:
                requested_T = requested_T + here_T
                dropped_TK = tokens.add(
                    dropped_TK, self.counting.on_all_choices(routing.dropped_TK)
                )
                routings.append(routing)

        y_TD = self.layer_norms.finish(x_TD, y_TD, tokens, lambda: run.tokens(~padding_T))
        if not with_stats:
            return y_TD.view_as(x), None
        stats = self.counting.stats(routings, requested_T, dropped_TK, x.shape[:-1], cmr_stats)
        return y_TD.view_as(x), stats

    def _mix_experts(
        self, i: int, h_TD: Tensor, routing: Routing, run: PerExpert | Grouped
    ) -> Callable[[], Tensor]:
        """``sum_e G_e FFN_e(h)`` over the kept experts of stratum ``i``'s gate, once it is called for."""
        no_expert_TK = routing.expert_TK == self.gates[i].num_experts
        expert_TK = routing.expert_TK + self.strata.first_experts[i]
        expert_TK = expert_TK.masked_fill(no_expert_TK, self.strata.num_experts)
        kept_E = on_all_experts(self.strata, i, routing.kept_E)
        # NaN * 0 is NaN, and copies without an expert share the padding row with those of other
        # tokens: their weights are zeroed explicitly.
        weight_TK = routing.weight_TK.masked_fill(no_expert_TK, 0)
        weight_TK = mask_outputs(weight_TK, self.eom, self.training)
        mixed = self.dispatcher.mix(h_TD, expert_TK, weight_TK, routing.rank_TK, kept_E, run)
        if self.simple is not None:
            mixed = partial(self.simple, h_TD, routing.simple_TS, mixed)
        if self.fom > 0:
            all_T1 = torch.ones(len(h_TD), 1, dtype=run.w1.dtype, device=h_TD.device)
            mixed = partial(_masked, mixed, mask_outputs(all_T1, self.fom, self.training))
        for network in (self.shared, self.residual):
            if network is not None:
                mixed = partial(network, h_TD, mixed)
        return mixed

    def _labels(self, x: Tensor, ids: Tensor | None) -> Tensor | None:
        """What the gates ask for of each token beside what stands for it, ``(T,)``."""
        asked = self.gates[0].asks_for
        if asked == "id":
            if ids is None or ids.shape != x.shape[:-1]:
                raise ValueError(f"a hash gate needs ids of shape {tuple(x.shape[:-1])}")
            return ids.reshape(-1)
        if asked == "sentence":
            shape = x.shape[:-1]
            sentence = torch.arange(shape[:-1].numel(), device=x.device).unsqueeze(1)
            return sentence.expand(-1, shape[-1]).reshape(-1)
        return None

    def _next_stratum(self, i: int, routing: Routing) -> Tensor:
        """A token goes on behind the stratum of its first choice, dropped there or not."""
        if self.strata.fixed_depth:
            return torch.full_like(routing.first_choice_T, i + 1)
        return self.stratum_of_expert[routing.first_choice_T + self.strata.first_experts[i]] + 1

    @torch.no_grad()
    def end_update(self, observed_LN: Tensor) -> None:
        """After an optimizer step, for gates that learn by counts and not by gradient.

        Args:
            observed_LN: ``observed`` of the statistics, summed over the batches of the update.
        """
        if self.gates[0].observes_together:
            observed_LN = observed_LN.sum(0).expand_as(observed_LN)
        for gate, observed_N in zip(self.gates, observed_LN, strict=True):
            gate.update(observed_N[: gate.observes])


def _masked(mixed: Callable[[], Tensor], mask_T1: Tensor) -> Tensor:
    return mixed() * mask_T1
