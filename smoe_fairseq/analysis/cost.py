"""Parameters, FLOPs and requested capacity of a model, built without memory."""

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fairseq.criterions import CRITERION_REGISTRY
from fairseq.data import Dictionary, TruncatedDictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_INV_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.modules import MultiheadAttention
from fairseq.optim import OPTIMIZER_REGISTRY
from torch import nn

from smoe_fairseq.errors import UsageError
from smoe_fairseq.flags import add_flag, refusing_flags
from smoe_fairseq.models.memory import shapes_only
from smoe_fairseq.models.options import (
    DecoderOptions,
    SMoETransformerConfig,
    SMoETransformerLMConfig,
)
from smoe_fairseq.models.transformer import moe_blocks
from smoe_fairseq.modules import StratifiedMoE

OF_TRANSLATION = ARCH_MODEL_INV_REGISTRY["smoe_transformer"]
OF_LANGUAGE = ARCH_MODEL_INV_REGISTRY["smoe_transformer_lm"]
ARCHITECTURES = [*OF_TRANSLATION, *OF_LANGUAGE]


def add_model_arguments(parser: ArgumentParser) -> None:
    """``--arch`` and the models' flags, as for fairseq-train; a language model uses some of them."""
    parser.add_argument(
        "--arch", choices=ARCHITECTURES, default="smoe_transformer_base", help="default: base"
    )
    SMoETransformerConfig.add_args(parser.add_argument_group("model, as for fairseq-train"))


def parse_model(words: Sequence[str]) -> Namespace:
    """The model's flags of a command line of fairseq-train; others are ignored."""
    parser = ArgumentParser(allow_abbrev=False, add_help=False)
    add_model_arguments(parser)
    with refusing_flags():
        return parser.parse_known_args(list(words))[0]


def is_language_model(args: Namespace) -> bool:
    """Whether ``--arch`` is of a model that has no encoder."""
    return args.arch in OF_LANGUAGE


def config_of(args: Namespace) -> DecoderOptions:
    """All options of the model of ``args``; those without a flag are the architecture's."""
    return ARCH_MODEL_REGISTRY[args.arch].config_class.of(_complete(args))


def _complete(args: Namespace) -> Namespace:
    options = {name: value for name, value in vars(args).items() if value is not None}
    if is_language_model(args):
        for name in SMoETransformerLMConfig.of_translation():
            default = getattr(SMoETransformerConfig, name)
            if isinstance(default, bool) and options.get(name) is default:
                del options[name]  # the flag is not set
    args = Namespace(**options)
    ARCH_CONFIG_REGISTRY[args.arch](args)
    return args


MAX_VOCABULARY = 10_000_000


def build_meta_model(args: Namespace, vocabulary: int, outputs: int | None = None) -> nn.Module:
    """As `build_model`, without memory for its weights."""
    with shapes_only():
        return build_model(args, vocabulary, outputs)


def build_model(args: Namespace, vocabulary: int, outputs: int | None = None) -> nn.Module:
    """The model of ``args`` with one dictionary of ``vocabulary`` entries, special ones included.

    ``outputs`` is the number of predicted entries, if not all are. Raises UsageError for options that do not
    define a model.
    """

    class Task:
        source_dictionary = target_dictionary = Dictionary()

    specials = len(Task.source_dictionary)
    if not specials < vocabulary <= MAX_VOCABULARY:
        bounds = f"more than the {specials} special tokens, and at most {MAX_VOCABULARY:,}"
        raise UsageError(f"--vocab-size {vocabulary}: expected {bounds}")
    for i in range(vocabulary - specials):
        Task.source_dictionary.add_symbol(str(i))
    if outputs is not None:
        Task.target_dictionary = TruncatedDictionary(Task.source_dictionary, outputs)
    return ARCH_MODEL_REGISTRY[args.arch].build_model(_complete(args), Task)


# The flags of ``fairseq-train`` that determine the cost of a run; `smoe cost` has them, too.

TOKENS = 4096


def number(text: str) -> int:
    """A number, or the largest of fairseq's list, which has one for each epoch."""
    return max(map(int, text.split(",")))


def add_run_arguments(parser) -> None:
    """Flags other than the model's, with defaults of fairseq or, if it has none, of the recipes."""

    def choice(flag: str, text: str, default: str, choices):
        text = f"{text}; default: {default}"
        parser.add_argument(flag, default=default, choices=choices, metavar="NAME", help=text)

    add_flag(parser, "--max-tokens", "N", "tokens per batch", int, TOKENS)
    add_flag(parser, "--batch-size", "N", "maximum number of sentences per batch", int)
    add_flag(parser, "--update-freq", "N", "batches per update", number, 1)
    for kind in ("fp16", "bf16"):
        words = f"train in {kind}, with a copy of the weights in fp32"
        parser.add_argument(f"--{kind}", action="store_true", help=words)
        words = f"train in {kind}, without this copy"
        parser.add_argument(f"--memory-efficient-{kind}", action="store_true", help=words)
    words = "with --fp16: each gradient is a tensor of its own"
    parser.add_argument("--fp16-no-flatten-grads", action="store_true", help=words)
    parser.add_argument("--amp", action="store_true", help="refused: no forecast for it")
    choice("--optimizer", "optimizer, with its default settings", "adam", OPTIMIZER_REGISTRY)
    name = "smoe_label_smoothed_cross_entropy"
    choice("--criterion", "criterion, with its default settings", name, CRITERION_REGISTRY)
    choice("--zero-sharding", "os: shard the optimizer's state", "none", ("none", "os"))
    add_flag(parser, "--ddp-backend", "NAME", "how ranks average gradients", default="pytorch_ddp")
    parser.add_argument("--cpu", action="store_true", help="compute on a CPU, not a GPU")


def parse_run(words: Sequence[str]) -> Namespace:
    """These flags and the model's of a command line of ``fairseq-train``; others are ignored.

    Raises UsageError for an invalid value.
    """
    parser = ArgumentParser(allow_abbrev=False, add_help=False)
    add_model_arguments(parser)
    add_run_arguments(parser)
    parser.add_argument("--momentum", type=float, default=0.0)  # of SGD
    with refusing_flags():
        return parser.parse_known_args(list(words))[0]


CONTEXT = 512  # positions, the limit of sentences in the paper's scripts

READING = """\
FLOPs per token are those of one forward pass, for one source token through the encoder and one target
token through the decoder (of a language model: for one token). As in Kaplan et al. (2020), each weight
that processes a token counts 2:
  attention   2 x the weights of query, key, value and output in every attention block
  ffn         2 x the weights of the feed-forward networks that process all tokens (a plugin's branch:
              x requested capacity)
  experts     2 x top-k x requested capacity x the weights of one expert, for each MoE layer; with other
              gates or null experts, top-k is the mean number of experts under uniform routing
  embedding   2 x vocabulary x dimension, as if the input were multiplied by the embedding
  output      2 x vocabulary x dimension, for the output projection
  context     2 x context x dimension, for each attention block
Biases, layer norms and gates are left out. The context is {context} positions (--context). The paper's
numbers are about 4 M higher; we cannot explain this (docs/cost.md)."""


@dataclass(frozen=True)
class Cost:
    """Counts of one model; FLOPs are per token, see `READING`."""

    parameters: int  # shared ones are counted once
    active_parameters: float  # without experts that a token does not use, on average
    requested_capacity: float | None  # mean over the MoE layers, in strata; None: a dense model
    flops: dict[str, float]  # by part

    @property
    def flops_per_token(self) -> float:
        return sum(self.flops.values())


def count(
    model: nn.Module,
    context: int = CONTEXT,
    requested_capacity: Mapping[str, float] | None = None,
    experts_per_token: float | None = None,
) -> Cost:
    """Counts a model, on the meta device or another.

    Args:
        model: one of ours.
        context: positions that attention sees.
        requested_capacity: by the layers' names in `moe_blocks`; by default that of uniform routing.
        experts_per_token: from the log of training, for gates that learn the number of experts; by default
            that of uniform routing.
    """
    blocks = moe_blocks(model)
    if requested_capacity is None:
        requested_capacity = {n: b.strata.expected_requested_capacity() for n, b in blocks.items()}
    linear, times = {"attention": 0, "ffn": 0, "output": 0}, {}
    for name, block in blocks.items():
        times |= dict.fromkeys(block.extra.modules(), requested_capacity[name])
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and (part := _part(name)):
            linear[part] += times.get(module, 1) * module.weight.numel()
    attentions = (m for m in model.modules() if isinstance(m, MultiheadAttention))

    parameters = sum(parameter.numel() for parameter in model.parameters())
    idle, expert_weights = 0.0, 0.0
    for name, block in blocks.items():
        copies = copies_per_stop(block, experts_per_token)
        used = copies * requested_capacity[name]
        num_experts = block.strata.num_experts
        experts = block.experts
        expert_weights += used * (experts.w1[0].numel() + experts.w2[0].numel())
        size = sum(p.numel() for p in experts.parameters()) / num_experts
        if block.strata.chain > 1:  # passes may choose the same experts
            untouched = (1 - copies / num_experts) ** block.strata.chain
            used = num_experts * (1 - untouched)
        idle += max(num_experts - used, 0) * size
    return Cost(
        parameters=parameters,
        active_parameters=parameters - idle,
        requested_capacity=sum(requested_capacity.values()) / len(blocks) if blocks else None,
        flops={
            "attention": 2 * linear["attention"],
            "ffn": 2 * linear["ffn"],
            "experts": 2 * expert_weights,
            "embedding": 2 * model.decoder.embed_tokens.weight.numel(),
            "output": 2 * linear["output"],
            "context": sum(2 * context * attention.embed_dim for attention in attentions),
        },
    )


def copies_per_stop(block: StratifiedMoE, measured: float | None = None) -> float:
    """Experts that compute a token per stop: ``measured`` if a gate learns the number, else the average under
    uniform routing."""
    if measured is not None and any(gate.learns_num_experts for gate in block.gates):
        return measured
    visits = block.strata.expected_visits()
    copies = (
        n * gate.experts_per_token(block.config, gate.num_experts)
        for n, gate in zip(visits, block.gates, strict=True)
    )
    return sum(copies) / sum(visits)


def _part(name: str) -> str | None:
    if "attn." in name:
        return "attention"
    if name.endswith((".fc1", ".fc2")) or ".moe.extra." in name:
        return "ffn"
    return "output" if name.endswith("output_projection") else None  # the rest: gates
