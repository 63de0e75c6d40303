// The command `inspect` for llm.c models, debug states, optimizer states and eval files.
#pragma once

#include <string>

// Describes the file. Returns false and prints nothing if it is not an llm.c file. Fails with Exit::data and the reason
// if the file is invalid, or a Llama 3 file, which is not supported.
bool inspect_llmc_file(const std::string& path);

// Runs an llm.c model file on the tokens of a debug state and prints the error of the logits, the loss and the gradient
// of each tensor relative to the file. Fails with Exit::data if an error is larger than FP32 rounding explains, and as
// LlmcModel and LlmcDebugState do.
void compare_with_debug_state(const std::string& model_path, const std::string& path);
