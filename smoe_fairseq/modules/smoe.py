"""The stratified mixture-of-experts block: strata, gates, dispatcher and experts composed.

Shapes: T tokens, D embedding, F feed-forward, E experts, M null experts, K choices per token, L strata.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from smoe_fairseq.modules.beside import ResidualNetwork, SharedExperts
from smoe_fairseq.modules.checks import (
    check_balance_over,
    check_beside,
    check_choice,
    check_gate,
    check_norms,
    check_number,
    check_probability,
    check_scale,
    check_strata_knobs,
)
from smoe_fairseq.modules.cmr import ConditionalRouting
from smoe_fairseq.modules.dispatch import LocalDispatcher, ShardedDispatcher
from smoe_fairseq.modules.execution import EXECUTIONS, Grouped, PerExpert, start_pass
from smoe_fairseq.modules.experts import Activation, Experts
from smoe_fairseq.modules.gates.make import GateOptions, make_gate
from smoe_fairseq.modules.masking import drop_gating, mask_outputs
from smoe_fairseq.modules.option_error import OptionError
from smoe_fairseq.modules.placement import Placement
from smoe_fairseq.modules.routing import Routing
from smoe_fairseq.modules.stats import Counting, RoutingStats, on_all_experts
from smoe_fairseq.modules.strata import Strata

NORMS = ("paper", "released")
DROPOUTS = ("stratum", "layer")


class StratifiedMoE(nn.Module):
    """Stratified mixture of experts, its layer norms and residuals inside (paper, section 3).

    One stratum is a pre-norm MoE sublayer (GShard with top-2, Switch with top-1).

    Args:
        embed_dim: D.
        ffn_embed_dim: F, the width of each expert.
        strata: sizes of the strata in the paper's notation: "16" is vanilla, "4-12" has two.
        stacked: naive stacking, the paper's baseline: the strata are ordinary MoE layers in a row, with
            one layer norm before the first and one residual around all.
        gate: one of `GATES`: "topk" (`TopKGate`), "top-p" (`TopPGate`) or, with one stratum, "hash"
            (`HashGate`), "base" (`BaseGate`), "expert-choice" (`ExpertChoiceGate`).
        top_k, gate_normalization, second_expert_policy, null_experts: see `TopKGate`.
        top_p: see `TopPGate`.
        hash_table: see `HashGate`, which needs it, and ``ids`` in every pass.
        balance: "loss", or "bias" of a top-k gate: `update_bias` once per update, see `ExpertBias`.
        bias_step: see `ExpertBias`.
        balance_over: "batch", or "update": the statistics have ``mean_probs`` for `balance_loss`.
        capacity_factor, eval_capacity_factor, drop_order: see `Capacity`, or `ExpertChoiceGate`.
        norms: "paper" normalises what each stratum's gate and experts get, and adds their output to what
            was there before; "released" computes as the paper's released code: from the second stratum
            on the residual is normalised too, and the block's output once more. The same with one stratum.
        gate_init_scale: of the gates' initial weights, over those of ``nn.Linear``.
        output_init_scale: the same of the experts' second weights and biases.
        activation_fn: the experts' activation: a function, or the name of one in `torch.nn.functional`.
        dropout: of each stratum's output, before its residual, or of all they added to a token.
        dropout_per: "stratum" or "layer": which of the two.
        activation_dropout: after the activation in the experts.
        eom: expert output masking, the probability that a selected expert's output is left out.
        fom: final output masking, the probability that a token's mixed output is left out.
        gating_dropout: the probability that the block is skipped for a whole batch in training.
        cmr: conditional MoE routing, a gate between a shared network and the experts of one stratum.
        cmr_gate_drop: in training, the probability that a token has only the shared network.
        residual: see `ResidualNetwork`, of width F; with one stratum.
        shared_experts: see `SharedExperts`; with one stratum.
        expert_ffn_dim: width of each expert, shared ones too; 0: F.
        capacity_budget: how many strata a token is to stop at on average; above 0 the statistics have
            ``stops`` for a loss, see `expected_stops`.
        exit_bias: in evaluation, of the logits of later strata, see `ExitBias`.
        expert_parallel: the experts are spread over the processes of `torch.distributed`; its default
            process group has to be there before the block. Every process has to make the same passes.
        chain: so many passes over the experts of one stratum, each with a gate and a layer norm of its own,
            for every token; see `Strata`.
        execution: how experts are computed, see `start_pass`; an attribute that may be changed.

    Raises:
        OptionError: a ValueError, for a value that the block cannot take; it names the parameter.
    """

    def __init__(
        self,
        embed_dim: int,
        ffn_embed_dim: int,
        strata: str = "2-2-2-2",
        top_k: int = 2,
        capacity_factor: float = 2.0,
        eval_capacity_factor: float = 0.0,
        gate_normalization: str = "after-drop",
        second_expert_policy: str = "sampling",
        drop_order: str = "sentence",
        stacked: bool = False,
        norms: str = "paper",
        gate_init_scale: float = 1.0,
        output_init_scale: float = 1.0,
        activation_fn: Activation = "relu",
        dropout: float = 0.0,
        dropout_per: str = "stratum",
        activation_dropout: float = 0.0,
        eom: float = 0.0,
        fom: float = 0.0,
        gating_dropout: float = 0.0,
        cmr: bool = False,
        cmr_gate_drop: float = 0.0,
        expert_parallel: bool = False,
        execution: str = "auto",
        gate: str = "topk",
        top_p: float = 0.4,
        hash_table: Tensor | None = None,
        null_experts: int = 0,
        balance: str = "loss",
        bias_step: float = 1e-3,
        balance_over: str = "batch",
        residual: bool = False,
        shared_experts: int = 0,
        expert_ffn_dim: int = 0,
        chain: int = 1,
        capacity_budget: float = 0.0,
        exit_bias: float = 0.0,
    ):
        super().__init__()
        self.strata = Strata.parse(strata, stacked, chain)
        gate_options = GateOptions(
            gate=gate,
            top_k=top_k,
            top_p=top_p,
            hash_table=hash_table,
            capacity_factor=capacity_factor,
            eval_capacity_factor=eval_capacity_factor,
            drop_order=drop_order,
            gate_normalization=gate_normalization,
            second_expert_policy=second_expert_policy,
            gate_init_scale=gate_init_scale,
            null_experts=null_experts,
            balance=balance,
            bias_step=bias_step,
            exit_bias=exit_bias,
        )
        check_gate(gate_options, self.strata)
        check_balance_over(balance_over, gate_options)
        check_strata_knobs(capacity_budget, exit_bias, self.strata)
        check_choice("norms", norms, NORMS)
        check_choice("dropout_per", dropout_per, DROPOUTS)
        check_norms(norms, dropout_per, self.strata)
        check_scale("output_init_scale", output_init_scale)
        check_beside(shared_experts, residual, cmr, self.strata)
        check_number("expert_ffn_dim", expert_ffn_dim)
        check_probability("eom", eom)
        check_probability("fom", fom)
        check_probability("gating_dropout", gating_dropout)
        check_probability("cmr_gate_drop", cmr_gate_drop)
        check_choice("execution", execution, EXECUTIONS)
        expert_ffn_dim = expert_ffn_dim or ffn_embed_dim
        self.learns_balance = gate_options.learns_balance
        self.balance, self.balance_over = balance, balance_over
        self.capacity_budget = capacity_budget
        self.dropout = dropout
        self.dropout_per = dropout_per
        self.normalize_residual = norms == "released" and len(self.strata) > 1
        self.eom = eom
        self.fom = fom
        self.gating_dropout = gating_dropout
        self.layer_norms = nn.ModuleList(
            nn.LayerNorm(embed_dim)
            for _ in range(1 if stacked else len(self.strata) + self.normalize_residual)
        )
        self.gates = nn.ModuleList(
            make_gate(gate_options, embed_dim, num_visible, own)
            for num_visible, own in zip(self.strata.visible, self.strata.own, strict=True)
        )
        self.choices = max(gate.top_k for gate in self.gates)  # K
        self.counting = Counting(
            self.strata,
            self.choices,
            null_experts,
            asked=balance == "bias",
            entropy=gate == "top-p",
            mean_probs=balance_over == "update",
            stops=capacity_budget > 0,
        )
        place = self._placement(expert_parallel)
        self.experts = Experts(
            place, embed_dim, expert_ffn_dim, activation_fn, activation_dropout, output_init_scale
        )
        self.dispatcher = (
            ShardedDispatcher(place) if place.is_sharded else LocalDispatcher(place.num_experts)
        )
        self.cmr = None
        if cmr:
            self.cmr = ConditionalRouting(
                embed_dim, ffn_embed_dim, activation_fn, activation_dropout, cmr_gate_drop
            )
        self.shared = self.residual = None
        if shared_experts:
            width = shared_experts * expert_ffn_dim
            self.shared = SharedExperts(embed_dim, width, activation_fn, activation_dropout)
        if residual:
            self.residual = ResidualNetwork(
                embed_dim, ffn_embed_dim, activation_fn, activation_dropout
            )
        self.register_buffer(
            "stratum_of_expert", torch.tensor(self.strata.stratum_of_expert), persistent=False
        )
        self.register_buffer(
            "visible_of_gate", torch.tensor(self.strata.visible), persistent=False
        )  # experts that each sees
        self.execution = execution

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
        stacked = self.strata.stacked
        stratum_dropout = self.dropout if self.dropout_per == "stratum" else 0.0
        y_TD = self.layer_norms[0](x_TD) if stacked else x_TD
        routings, cmr_stats = [], None

        for i, gate in enumerate(self.gates):
            here_T = position_T == i
            tokens = run.tokens(here_T)
            h_TD = tokens.take(y_TD)
            if not stacked:
                h_TD = self.layer_norms[i](h_TD)
            if self.normalize_residual and i > 0:
                y_TD = tokens.replace(y_TD, h_TD)
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
            if stacked:
                y_TD = tokens.replace(y_TD, out_TD)
            else:
                y_TD = tokens.add(y_TD, F.dropout(out_TD, stratum_dropout, self.training))
            if with_stats:
                requested_T = requested_T + here_T
                dropped_TK = tokens.add(
                    dropped_TK, self.counting.on_all_choices(routing.dropped_TK)
                )
                routings.append(routing)

        if stacked:  # every real token was in the last stratum
            y_TD = tokens.add(x_TD, F.dropout(tokens.take(y_TD), self.dropout, self.training))
        elif self.normalize_residual:
            real = run.tokens(~padding_T)  # of a skipped batch too, or its scale would be another
            y_TD = real.replace(y_TD, self.layer_norms[-1](real.take(y_TD)))
        elif self.dropout_per == "layer" and self.training and self.dropout > 0:
            y_TD = x_TD + F.dropout(y_TD - x_TD, self.dropout, self.training)
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
        # A token that is no number has no weight that is one, 0 times it neither, and copies without an
        # expert share a row with those of other tokens.
        weight_TK = routing.weight_TK.masked_fill(no_expert_TK, 0)
        weight_TK = mask_outputs(weight_TK, self.eom, self.training)
        mixed = self.dispatcher.mix(h_TD, expert_TK, weight_TK, routing.rank_TK, kept_E, run)
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
    def update_bias(self, asked_LE: Tensor) -> None:
        """With ``balance`` bias, once per update: ``asked`` of the statistics, all its batches together."""
        for i, gate in enumerate(self.gates):
            first = self.strata.first_experts[i]
            gate.bias.update(asked_LE[i, first : first + self.strata.visible[i]])


def _masked(mixed: Callable[[], Tensor], mask_T1: Tensor) -> Tensor:
    return mixed() * mask_T1
