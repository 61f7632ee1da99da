"""What fairseq's programs route to the experts: record_routing.py OUT STRATA train|generate FLAGS...

Runs the program with every gate's decisions counted, and writes for each pass of a block, in order,
its layer, its tokens and how many each expert got at each stratum: what `predict.py` times bare.
"""

import json
import sys
from pathlib import Path

from benchmarks.floor import experts_of_gate
from smoe_fairseq.modules.gates.top_k import TopKGate
from smoe_fairseq.modules.strata import Strata


def main(out: Path, strata: Strata, program: str) -> None:
    gates, decisions = [], []
    forward = TopKGate.forward

    def counting_forward(gate, *args, **kwargs):
        routing = forward(gate, *args, **kwargs)
        if not any(gate is known for known in gates):
            gates.append(gate)
        number = next(i for i, known in enumerate(gates) if gate is known)
        tokens = int(routing.first_choices_E.sum())
        decisions.append((number, tokens, experts_of_gate(gate, routing, strata)))
        return routing

    TopKGate.forward = counting_forward
    if program == "train":
        from fairseq_cli.train import cli_main
    else:
        from fairseq_cli.generate import cli_main
    cli_main()

    # Every pass of a block asks each of its gates once, in order.
    passes = [decisions[i : i + len(strata)] for i in range(0, len(decisions), len(strata))]
    found = [
        {
            "layer": one[0][0] // len(strata),
            "tokens": one[0][1],
            "counts_LE": [counts_E for _, _, counts_E in one],
        }
        for one in passes
    ]
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    out, strata, program = sys.argv[1:4]
    sys.argv = [program, *sys.argv[4:]]
    main(Path(out), Strata.parse(strata), program)
