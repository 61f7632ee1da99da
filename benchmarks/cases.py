"""Which blocks are timed: sizes, strata, tokens, training or inference."""

from dataclasses import dataclass

SIZES = {"base": (512, 2048), "big": (1024, 4096)}
STRATA = ("8", "4-4", "2-2-2-2", "16", "4-12", "4-4-4-4")
TOKENS = (8, 40, 512, 4096, 16384)  # 40 is one decoding step: beam 5 of 8 sentences
MODES = ("train", "infer")
# Sweeps at 4096 tokens and the base size: experts in one stratum, strata of two experts each.
EXPERTS = tuple(str(experts) for experts in (8, 16, 32, 64, 128))
DEPTHS = tuple("-".join(["2"] * depth) for depth in range(1, 9))


@dataclass(frozen=True)
class Case:
    size: str
    strata: str
    tokens: int
    mode: str

    def __str__(self) -> str:
        return f"{self.size}/{self.strata}/{self.tokens}/{self.mode}"

    @property
    def embed_dim(self) -> int:
        return SIZES[self.size][0]

    @property
    def ffn_embed_dim(self) -> int:
        return SIZES[self.size][1]

    @property
    def has_peers(self) -> bool:
        """Peers know only one stratum; all of them are timed with 8 experts."""
        return self.strata == "8"


def full() -> list[Case]:
    """Everything at the base size; at the big one, where a pass takes four times as long, a part."""
    base = [
        Case("base", strata, tokens, mode)
        for strata in STRATA
        for tokens in TOKENS
        for mode in MODES
    ]
    sweeps = [Case("base", strata, 4096, mode) for strata in EXPERTS + DEPTHS for mode in MODES]
    big = [
        Case("big", strata, tokens, mode)
        for strata in STRATA
        for tokens in (40, 4096)
        for mode in MODES
    ]
    peers = [Case("big", "8", tokens, mode) for tokens in TOKENS for mode in MODES]
    return list(dict.fromkeys(base + sweeps + big + peers))


def quick() -> list[Case]:
    """About three minutes on two cores."""
    cases = [Case("base", strata, 512, "train") for strata in ("8", "4-4", "2-2-2-2")]
    cases += [Case("base", strata, 40, "infer") for strata in ("8", "4-4", "2-2-2-2")]
    cases += [Case("base", "8", 4096, "train"), Case("base", "2-2-2-2", 4096, "train")]
    return cases + [
        Case("base", "64", 4096, "infer"),
        Case("base", "2-2-2-2-2-2-2-2", 512, "infer"),
    ]
