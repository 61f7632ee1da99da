"""The members of the wider family as flags, each with what it goes with."""

FAMILY = {
    "top-3": "--smoe-strata 4-4 --moe-top-k 3",
    "null": "--smoe-strata 4-4 --moe-top-k 3 --moe-null-experts 3",
    "simple": "--smoe-strata 4-4 --moe-top-k 3 --moe-copy-experts 1 --moe-constant-experts 2 "
    "--moe-null-experts 1 --moe-second-expert-policy all",
    "gate-residual": "--smoe-strata 4-4 --moe-gate-residual layers",
    "top-p": "--smoe-strata 4-4 --moe-gate top-p",
    "relu": "--smoe-strata 4-4 --moe-gate relu --moe-capacity-factor 0",
    "threshold": "--smoe-strata 4-4 --moe-gate threshold --moe-capacity-factor 0",
    "depths": "--smoe-strata 8 --moe-gate depths --moe-capacity-factor 2",
    "hash": "--smoe-strata 8 --moe-gate hash",
    "hash-topk": "--smoe-strata 8 --moe-gate hash-topk",
    "base": "--smoe-strata 8 --moe-gate base",
    "expert-choice": "--smoe-strata 8 --moe-gate expert-choice --moe-capacity-factor 2",
    "residual": "--smoe-strata 8 --moe-top-k 1 --moe-residual",
    "shared": "--smoe-strata 8 --moe-top-k 3 --moe-shared-experts 2 --moe-expert-ffn-dim 32",
    "gated": "--smoe-strata 8 --activation-fn swiglu --moe-shared-experts 1",
    "bias": "--smoe-strata 4-4 --moe-balance bias --moe-second-expert-policy all --moe-bias-step 0.01",
    "sigmoid": "--smoe-strata 4-4 --moe-scores sigmoid --moe-balance bias "
    "--moe-second-expert-policy all --moe-bias-step 0.01",
    "layers": "--encoder-smoe-strata 4-0-4 --decoder-smoe-strata 2-6",
    "chain": "--smoe-strata 8 --smoe-chain 3",
    "update": "--smoe-strata 4-4 --moe-balance-over update",
    "budget": "--smoe-strata 4-4 --smoe-capacity-budget 1.2",
}
