"""fairseq-generate, after a first call of attention.

That call has torch load modules, which takes a third of a second. Of the models compared here some
make it before fairseq's clock starts, others after.
"""

import torch
from fairseq.modules import MultiheadAttention
from fairseq_cli.generate import cli_main

if __name__ == "__main__":
    x = torch.zeros(2, 2, 8)
    mask = torch.zeros(2, 2, dtype=torch.bool)
    with torch.no_grad():
        MultiheadAttention(8, 1, self_attention=True)(x, x, x, key_padding_mask=mask)
    cli_main()
