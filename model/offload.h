// Arrays in host memory: the optimizer's of each parameter with GptOptions::offload_optimizer, the inputs of blocks
// with offload_activations, compute weights with offload_weights, gradients with offload_gradients. They pass through
// windows of device memory, and the copies of a window have their own stream.
//
// The ops of an update process the optimizer's arrays in Pieces. While one window sends a piece back, the other
// receives the next one:
//
//     window 0        | in 0 |         | out 0 | in 2  |         | out 2 | in 4  | ...
//     window 1               | in 1    |       | out 1 | in 3    |       | out 3 | ...
//     the program's          | piece 0 |       | piece 1         | piece 2       | ...
//
// The first two pieces arrive during the passes, or with offload_gradients after them. The update starts when the
// norm of all gradients is known. State of whole matrices passes through separate windows in the same order: see
// model/matrices.h.
//
// Inputs of blocks have two windows too, for the even and the odd ones: an input is sent after the block's forward pass
// and arrives before its backward pass, in both cases while the neighbor is computed.
//
// The windows of compute weights and gradients are the slots of buckets: see model/sharding.h. The update has them in
// its pieces.
//
// The device computes the same elements with the same ops as without offload, so the bits are the same.
#pragma once

#include <optional>

#include "kernels/device.h"
#include "kernels/tensor.h"
#include "model/activations.h"
#include "model/arena.h"
#include "model/gpt.h"

struct GptState;

struct OffloadState {
    HostBuffer memory;
    std::optional<SideStream> copies[2];  // of each window, of the update's arrays and of activations; null in a plan
    std::byte* windows[2] = {};           // of the update's arrays
    size_t elements = 0;                  // of each array in a window
    OffloadTraffic traffic;               // since begin_step()

    // Whether the array is in host memory.
    bool has(ConstView array) const;
    Stream stream(int window) const { return copies[window]->stream(); }
};

// Whether masters are in host memory. If they are the compute weights, offload_weights decides.
bool masters_are_offloaded(const GptOptions& options);

// Lays out the update's windows in the arena. Requires the other arrays of the update.
void place_offload(GptState& s, Arena& arena);

// Creates the streams of the copies.
void open_offload(GptState& s);

// Copies elements between host and device memory on the stream `copies`, after the work queued so far on the program's.
void copy_offloaded(GptState& s, View to, ConstView from, size_t elements, Stream copies);

// Ends the use of Pieces in a step: later work on the program's stream may access the arrays. Before the next step, the
// host must have waited for that work.
void end_update_of_offloaded(GptState& s);

// The input of a block whose BlockActivations::residual is in host memory; else these do nothing. Forward pass: hold it
// before the block, send it after the block. Backward pass: fetch it two blocks ahead, hold it before the block.
//
// Work queued later may write or read the window.
void hold_input(const GptState& s, const Activation& input);
// Sends the window's content after the work queued so far.
void send_input(GptState& s, const Activation& input);
// Brings the content back to the window after the work queued so far.
void fetch_input(GptState& s, const Activation& input);
