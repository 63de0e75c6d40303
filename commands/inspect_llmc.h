// The command `inspect` for llm.c's files of models, debug states, optimizer states and multiple-choice questions.
#pragma once

#include <string>

// Prints what the file is. Returns false, with nothing printed, if it is none of them. Fails with Exit::data, with what
// is wrong, if it is one and not sound, or a Llama 3 model, which this program does not have.
bool inspect_llmc_file(const std::string& path);

// Runs a model file of llm.c on the tokens of a debug state and prints, for the logits, the loss and the gradient of
// each tensor, how far this program's result is from the file's. Fails with Exit::data if a difference is larger than
// FP32 arithmetic explains, or as LlmcModel and LlmcDebugState do.
void compare_with_debug_state(const std::string& model_path, const std::string& path);
