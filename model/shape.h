// The sizes of a GPT. The letters are llm.c's:
// B sequences, T positions, C channels, L layers, V vocabulary, Vp vocabulary padded to 128, P learned positions.
#pragma once

struct GptShape {
    int n_layer = 0;
    int n_head = 0;
    int n_kv_head = 0;  // n_head in GPT-2 and GPT-3
    int n_embd = 0;
    int n_positions = 0;
    int vocab_size = 0;

    int one() const { return 1; }
    int channels() const { return n_embd; }
    int positions() const { return n_positions; }
    int head_size() const { return n_embd / n_head; }
    int qkv_channels() const { return (n_head + 2 * n_kv_head) * head_size(); }
    int hidden() const { return 4 * n_embd; }
    // A multiple of 128, so that every row of logits is aligned and tiles of the head's product are whole.
    int padded_vocab() const { return (vocab_size + 127) / 128 * 128; }
};
