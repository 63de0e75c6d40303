#include "test/fuzz/parsers.h"

#include <algorithm>

#include "kernels/base/check.h"

const std::vector<Parser>& parsers() {
    static const std::vector<Parser> list = {
        {"config", read_config_file},
        {"manifest", read_manifest_text},
        {"shard_record", read_shard_record},
        {"checkpoint", read_checkpoint},
        {"safetensors", read_safetensors},
        {"safetensors_index", read_safetensors_index},
        {"messages", read_messages},
        {"token_shard", read_token_shard},
        {"dataset", read_dataset_record},
        {"tokenizer", read_tokenizer},
        {"vocabulary", read_vocabulary},
        {"parquet", read_parquet},
        {"texts", read_texts},
        {"questions", read_question_file},
        {"llmc_model", read_llmc_model},
        {"hf_config", read_hf_config},
        {"run_records", read_run_records},
    };
    return list;
}

const Parser* find_parser(std::string_view name) {
    const auto found = std::ranges::find(parsers(), name, &Parser::name);
    return found == parsers().end() ? nullptr : &*found;
}

std::string finding(const Parser& parser, std::string_view input) {
    try {
        parser.read(input);
    } catch (const Error& error) {
        const auto documented = std::ranges::find(kExitCodes, error.code, &ExitCode::code);
        if (error.code == Exit::internal || error.code == Exit::ok || documented == std::end(kExitCodes))
            return format("exit code %d: %s", int(error.code), error.what());
        if (std::string_view(error.what()).empty()) return "an error without a sentence";
    } catch (const std::exception& error) {
        return format("an exception that is not an Error: %s", error.what());
    }
    return "";
}
