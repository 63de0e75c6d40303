// The parsers of files and messages from other sources, each as a function of bytes: for the fuzzer, which creates
// the bytes, and for the replay of the corpora. A parser returns or fails with a documented exit code. Anything else (a
// crash, another exception, Exit::internal, a result that changes when it is written and read again) is a finding.
#pragma once

#include <string>
#include <string_view>
#include <vector>

struct Parser {
    const char* name;  // of its folder in test/fuzz/corpus/
    void (*read)(std::string_view input);
};
const std::vector<Parser>& parsers();

// The parser with this name; nullptr if there is none.
const Parser* find_parser(std::string_view name);

// Runs the parser on the input. Returns the finding, or "" if the parser behaved as documented.
std::string finding(const Parser& parser, std::string_view input);

// ---- the parsers; NUL separates the files of an input ---------------------------------------------------------------

void read_config_file(std::string_view input);        // configuration, then a line for each --set
void read_manifest_text(std::string_view input);      // MANIFEST.json
void read_shard_record(std::string_view input);       // a shard file's record
void read_checkpoint(std::string_view input);         // MANIFEST.json and the shard file; checksums are corrected
void read_safetensors(std::string_view input);        // model.safetensors
void read_safetensors_index(std::string_view input);  // model.safetensors.index.json next to a valid file
void read_messages(std::string_view input);           // of the control channel and the rendezvous

void read_token_shard(std::string_view input);     // train_000000.bin
void read_dataset_record(std::string_view input);  // dataset.json next to a valid shard
void read_tokenizer(std::string_view input);       // tokenizer.json or llm.c's tokenizer
void read_vocabulary(std::string_view input);      // vocab.json and merges.txt
void read_parquet(std::string_view input);         // Parquet with a column "text"
void read_texts(std::string_view input);           // a byte that chooses the format, then the file, also compressed
void read_question_file(std::string_view input);   // JSON Lines of questions

void read_llmc_model(std::string_view input);   // llm.c's model file
void read_hf_config(std::string_view input);    // config.json of Hugging Face
void read_run_records(std::string_view input);  // metrics.jsonl, samples.jsonl, run.json, config.json
