// Passes of a Gpt that only go forward: the losses of a batch, logits, and generation with a KV cache. They never drop.
// Each overwrites the activations of the last pass.
#pragma once

#include <span>

#include "model/gpt.h"

// Returns the sum of the losses of this rank's part of a batch in nats, on the last stage; the others return 0 and do
// not wait. tokens, targets: (B, T), the whole batch, -1 for no target. Waits for the device. `losses`, if not null,
// receives the loss of each target of this rank and 0 elsewhere: (B, T). With `seq_len`, which divides T, sequences are
// shorter and there are more of them: all three arrays are (B T / seq_len, seq_len).
double batch_loss(Gpt& gpt, const int* tokens, const int* targets, float* losses = nullptr, int seq_len = 0);

// Computes the float logits that follow token `row` (0 to B T - 1) of the last forward pass: (V) in `logits`.
void logits_of_row(Gpt& gpt, int row, float* logits);

// Computes the float logits that follow the last of `count` tokens, 1 <= count <= T: (V) in `logits`.
void next_token_logits(Gpt& gpt, const int* tokens, int count, float* logits);

// Generation with a KV cache, for a model with options.cached_sequences. prefill() reads the first `count` tokens of a
// sequence, 1 <= count <= T. decode() adds one token to each of several sequences that have room (sequence_length()
// below T). Both write the logits that follow each sequence's last token to `logits`: (V), or for decode() (tokens, V).
// Other computations in between do not affect the sequences.
struct NextToken {
    int sequence, token;
};
void prefill(Gpt& gpt, int sequence, const int* tokens, int count, float* logits);
void decode(Gpt& gpt, std::span<const NextToken> tokens, float* logits);
int sequence_length(Gpt& gpt, int sequence);
