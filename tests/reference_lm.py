"""A two-layer language model in plain loops over tokens and heads; shares no code with the package.

Pre-norm, a dense layer and then one of experts. ``params`` is the model's state dict, in float64.
"""

import math

import torch
from reference import layer_norm, reference

PAD = 1


def norm(params, name, x):
    return layer_norm(
        {f"layer_norms.0.{p}": params[f"{name}.{p}"] for p in ("weight", "bias")}, 0, x
    )


def linear(params, name, x):
    return params[f"{name}.weight"] @ x + params[f"{name}.bias"]


def position(number, dim):
    """Sines, then cosines, of the n-th position, which is counted from behind the padding's index."""
    half = dim // 2
    angles = [number / 10000 ** (i / (half - 1)) for i in range(half)]
    return torch.tensor([*map(math.sin, angles), *map(math.cos, angles)], dtype=torch.float64)


def attention(params, name, inputs, heads):
    """Each position sees itself and those before it."""
    size = len(inputs[0]) // heads
    q, k, v = ([linear(params, f"{name}.{p}_proj", x) for x in inputs] for p in "qkv")
    outputs = []
    for i in range(len(inputs)):
        parts = []
        for head in range(heads):
            of_head = slice(head * size, (head + 1) * size)
            scores = [float(q[i][of_head] @ k[j][of_head]) / math.sqrt(size) for j in range(i + 1)]
            top = max(scores)
            weights = [math.exp(score - top) for score in scores]
            mixed = sum(w * v[j][of_head] for j, w in enumerate(weights)) / sum(weights)
            parts.append(mixed)
        outputs.append(linear(params, f"{name}.out_proj", torch.cat(parts)))
    return outputs


def language_model(params, sentences, strata, heads):
    """Log probabilities ``(S, V)`` of each sentence's next tokens, and the balance loss of all."""
    table = params["decoder.embed_tokens.weight"]
    dim = table.shape[1]
    layers = "decoder.layers"
    hidden = []
    for tokens in sentences:
        x = [
            math.sqrt(dim) * table[token] + position(PAD + 1 + i, dim)
            for i, token in enumerate(tokens)
        ]
        for layer in (0, 1):
            own = f"{layers}.{layer}"
            inputs = [norm(params, f"{own}.self_attn_layer_norm", row) for row in x]
            mixed = attention(params, f"{own}.self_attn", inputs, heads)
            x = [row + y for row, y in zip(x, mixed)]
            if layer == 0:
                for i, row in enumerate(x):
                    h = linear(params, f"{own}.fc1", norm(params, f"{own}.final_layer_norm", row))
                    x[i] = row + linear(params, f"{own}.fc2", torch.relu(h))
        hidden.append(torch.stack(x))
    block = {
        name.removeprefix(f"{layers}.1.moe."): value
        for name, value in params.items()
        if name.startswith(f"{layers}.1.moe.")
    }
    together = torch.cat(hidden)
    y, balance, *_ = reference(
        block, strata, together, torch.zeros(len(together), dtype=torch.bool)
    )
    found = []
    for rows in y.split([len(rows) for rows in hidden]):
        logits = [table @ norm(params, "decoder.layer_norm", row) for row in rows]
        found.append(torch.stack([row - row.exp().sum().log() for row in logits]))
    return found, balance
