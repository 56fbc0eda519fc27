"""Prints the README's table of what fits where: arithmetic on the shapes of known models, no measurement.

    python tools/fit_table.py
"""

GB = 1e9

# name, blocks, hidden, feed-forward, query heads, key-value heads, head size, vocabulary, matrices in the feed-forward, embedding and head tied
MODELS = [
    ("Llama 3.1 8B", 32, 4096, 14336, 32, 8, 128, 128256, 3, False),
    ("Qwen3 32B", 64, 5120, 25600, 64, 8, 128, 151936, 3, False),
    ("Llama 3.1 70B", 80, 8192, 28672, 64, 8, 128, 128256, 3, False),
    ("Mistral Large 123B", 88, 12288, 28672, 96, 8, 128, 32768, 3, False),
    ("GPT-3 175B (OPT)", 96, 12288, 49152, 96, 96, 128, 50272, 2, True),
    ("Llama 3.1 405B", 126, 16384, 53248, 128, 8, 128, 128256, 3, False),
]

WITH_8BIT = 2 + 2 + 1 + 1 + 2 * 4 / 256  # hi, lo, m, v, two scales a block of 256
WITH_32BIT = 2 + 2 + 4 + 4  # embeddings keep 32-bit moments
VOCABULARY_TILE, WHOLE_BLOCK = 2**27, 2**29  # runtime/spec/model_spec.h, Tiling: elements


def sizes(blocks, hidden, inner, heads, kv_heads, head, vocabulary, matrices, tied):
    """(parameters, of them in the embedding, of the largest unit, in fp32 sums held for a tied table); norms and biases left out."""
    attention, mlp = 2 * hidden * heads * head + 2 * hidden * kv_heads * head, matrices * hidden * inner
    embedding = vocabulary * hidden
    block = attention + mlp if attention + mlp <= WHOLE_BLOCK else max(attention, mlp)
    tile = embedding if embedding <= VOCABULARY_TILE else VOCABULARY_TILE
    parameters = blocks * (attention + mlp) + embedding * (1 if tied else 2)
    return parameters, embedding, max(block, tile), embedding if tied else 0


def main():
    print("| model | parameters | state on NVMe | with staged gradients | device, least | device, overlapped |")
    print("|---|---|---|---|---|---|")
    for name, *shape in MODELS:
        parameters, embedding, largest, held = sizes(*shape)
        state = (parameters - embedding) * WITH_8BIT + embedding * WITH_32BIT
        least = 6 * largest + 4 * held  # bf16 weights and fp32 gradient of the unit at hand
        overlapped = least + 8 * largest  # the next two units' weights and one more gradient
        columns = [f"{parameters / 1e9:.1f} B", *(f"{x / GB:.0f} GB" for x in (state, state + 2 * parameters)), *(f"{x / GB:.1f} GB" for x in (least, overlapped))]
        print(f"| {name} | {' | '.join(columns)} |")


if __name__ == "__main__":
    main()
