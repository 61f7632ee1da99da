"""Terms that are added to the training loss, each a mean over the MoE layers that have it."""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from smoe_fairseq.modules.registry import GATES, LOSSES, parse_numbers

LOGGED = """loss nll_loss ppl accuracy n_correct total ntokens nsentences sample_size epoch num_updates
    wps ups wpb bsz lr gnorm clip loss_scale train_wall wall gb_free cmr_gate cmr_gate_loss
    smoe_budget_loss requested_capacity experts_per_token unused_expert1_count overflow_expert1
    overflow_expert2 overflow_further""".split()  # other numbers of the log


def register_loss(name: str, applies: Callable = lambda block: True) -> Callable:
    """A decorator for ``loss(block, stats)``, which returns a scalar; ``name`` is its name in the log.

    Args:
        applies: whether a `StratifiedMoE` has the term.

    Raises:
        ValueError: another loss, or another number of the log, has the name.
    """

    def add(loss):
        if name in LOGGED or name in (kind.own_loss for kind in GATES.values()):
            taken = "the log has another number of this name; expected another one"
            raise ValueError(f"loss {name!r} of {loss.__module__}: {taken}")
        loss.applies = applies
        return LOSSES.register(name)(loss)

    return add


@register_loss("moe_gate_loss", lambda block: block.config.learns_balance)
def balance(block, stats) -> Tensor:
    """The balance loss (paper, eq. 8)."""
    return stats.balance_loss


@register_loss("moe_z_loss")
def z(block, stats) -> Tensor:
    """The z-loss (Zoph et al. 2022)."""
    return stats.z_loss


@register_loss("moe_entropy_loss", lambda block: block.kind.has_entropy_loss)
def entropy(block, stats) -> Tensor:
    """The entropy of gates that would else choose all experts."""
    return stats.entropy


def gate_losses(blocks: Iterable, weights: Mapping[str, float]) -> dict[str, tuple[float, list]]:
    """The weight of each term, and the blocks that have it.

    Args:
        weights: by name, also 0; a gate's own loss is always there, with the weight 1.
    """
    terms = {}
    for block in blocks:
        named = {name: weight for name, weight in weights.items() if LOSSES[name].applies(block)}
        for name, weight in (named | ({n: 1.0} if (n := block.kind.own_loss) else {})).items():
            terms.setdefault(name, (weight, []))[1].append(block)
    return terms


def value(name: str, block, stats) -> Tensor:
    """A term of `gate_losses` in one pass; one that is not registered is the gate's own."""
    return LOSSES[name](block, stats) if name in LOSSES else stats.own_loss


def parse_weights(text: str) -> dict[str, float]:
    """The weights of ``NAME=WEIGHT,NAME=WEIGHT``.

    Raises:
        ValueError: a name is not registered or has its own flag, or a weight is no number of at least 0;
            one sentence.
    """
    weights = parse_numbers(text, LOSSES)
    for name, weight in weights.items():
        if LOSSES[name].__module__ == __name__:
            raise ValueError(f"{name}: expected its own flag, --{name.replace('_', '-')}-wt")
        if weight < 0:
            raise ValueError(
                f"{name}={weight:g}: expected a weight of at least 0, such as {name}=0.01"
            )
    return weights
