// The parsers of runtime/: configurations, checkpoints, safetensors, logs and messages.
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "runtime/checkpoint/checkpoint.h"
#include "runtime/checkpoint/shard.h"
#include "runtime/cluster/rank_monitor.h"
#include "runtime/config/config.h"
#include "runtime/io/crc32c.h"
#include "runtime/io/digest.h"
#include "runtime/io/files.h"
#include "test/fuzz/inputs.h"
#include "test/fuzz/parsers.h"

namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxLoadedBytes = size_t(1) << 20;

// Corrects the shard file's checksums in the manifest, so that the checks after them are reached.
std::string with_right_checksums(std::string_view manifest, std::string_view shard) {
    Json json = Json::parse(manifest, nullptr, false);
    if (!json.is_object() || !json.contains("shards") || !json["shards"].is_array() || json["shards"].empty())
        return std::string(manifest);
    Json& record = json["shards"][0];
    if (!record.is_object()) return std::string(manifest);
    std::string crcs;
    for (size_t begin = 0; begin < shard.size(); begin += kBlockBytes) {
        const std::string_view block = shard.substr(begin, kBlockBytes);
        crcs += format("%08x", crc32c(block.data(), block.size()));
    }
    record["xxh3_128"] = xxh3_128(shard);
    record["crc32c_of_each_mib"] = crcs;
    return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

// Loads all of a checkpoint's tensors, like a run with the same tensors.
void load_all(const Checkpoint& checkpoint) {
    std::vector<std::vector<std::byte>> memory;
    std::vector<NamedTensor> tensors = checkpoint.manifest().tensors;
    size_t total = 0;
    for (NamedTensor& tensor : tensors) {
        if ((total += bytes_of(tensor)) > kMaxLoadedBytes) return;
        memory.emplace_back(bytes_of(tensor));
        tensor.count = elements_of(tensor);
        tensor.values = {memory.back().data(), tensor.values.dtype};
    }
    checkpoint.load(tensors);
}

// Reads a received message's fields like control_channel.cpp and rendezvous.cpp.
void unpack_all_kinds(const std::string& fields) {
    RankStatus status;
    TextRequest request;
    TextReply reply;
    EndOfRun end;
    Member member;
    Exit code = Exit::ok;
    std::string text, mac, nonce;
    uint64_t number = 0;
    if (status.unpack_from(fields)) status.text();
    unpack(fields, request.must_be_same, request.what, request.text);
    unpack(fields, code, text);
    unpack(fields, reply.code, reply.text);
    unpack(fields, end.rank, end.code, end.sentence, end.is_reported);
    unpack(fields, number, nonce);
    unpack(fields, member.host, member.pid);
    if (unpack(fields, text, mac) && unpack(text, member.rank, number, member.host, member.pid, nonce)) member.text();
}

}  // namespace

void read_config_file(std::string_view input) {
    const size_t end = std::min(input.find('\0'), input.size());
    std::vector<std::string> overrides;
    for (std::string_view rest = input.substr(std::min(end + 1, input.size())); !rest.empty();) {
        const std::string_view line = rest.substr(0, rest.find('\n'));
        overrides.emplace_back(line);
        rest.remove_prefix(std::min(rest.size(), line.size() + 1));
    }
    const Config config = load_config(path_of(input.substr(0, end)), overrides, 1);
    if (input.size() % 4 != 0) return;  // the rest takes longer
    const std::string printed_config = config_json(config);
    require(config_json(parse_config(printed_config, "the printed configuration")) == printed_config,
            "the effective configuration is not what it was read from");
}

void read_manifest_text(std::string_view input) {
    const std::string text = manifest_to_text(manifest_from_text(input, "MANIFEST.json"));
    require(manifest_to_text(manifest_from_text(text, "MANIFEST.json")) == text, "a manifest that changes");
}

void read_shard_record(std::string_view input) {
    const std::string text = shard_to_text(shard_from_text(input, "shard_0000.bin.json"));
    require(shard_to_text(shard_from_text(text, "shard_0000.bin.json")) == text, "a shard's record that changes");
}

void read_checkpoint(std::string_view input) {
    const auto parts = parts_of(input, 2);
    const std::string manifest = with_right_checksums(parts[0], parts[1]);
    std::filesystem::create_directory(scratch_directory() / "checkpoint");
    scratch_file("checkpoint/MANIFEST.json", manifest);
    scratch_file("checkpoint/shard_0000.bin", parts[1]);
    scratch_file("checkpoint/COMMIT", format("%zu %s\n", manifest.size(), xxh3_128(manifest).c_str()));
    load_all(Checkpoint(scratch_directory() / "checkpoint"));
}

void read_safetensors(std::string_view input) {
    const Safetensors file(scratch_file("model.safetensors", input));
    for (const Safetensors::Entry& entry : file.entries())
        if (entry.type == "F32" || entry.type == "F16" || entry.type == "BF16" || entry.type == "F64") entry.floats();
}

void read_safetensors_index(std::string_view input) {
    static const std::string header = R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
    const uint64_t length = header.size();
    std::filesystem::create_directory(scratch_directory() / "index");
    scratch_file("index/model.safetensors",
                 std::string(reinterpret_cast<const char*>(&length), 8) + header + std::string(8, '\0'));
    const Safetensors file(scratch_file("index/model.safetensors.index.json", input));
    file.at("a", {2}).floats();
}

void read_messages(std::string_view input) {
    constexpr size_t kLimit = 4096;
    int ends[2];
    require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "fuzz: no socket pair");
    Connection connection(FileDescriptor(ends[0]), kLimit);
    FileDescriptor peer(ends[1]);
    // In two parts, so that messages also arrive in pieces.
    for (const std::string_view part : {input.substr(0, input.size() / 2), input.substr(input.size() / 2)}) {
        [[maybe_unused]] const ssize_t sent = ::send(peer, part.data(), part.size(), MSG_NOSIGNAL);
        connection.receive();
        while (const auto message = connection.next()) {
            require(message->fields.size() <= kLimit, "a message of %zu bytes", message->fields.size());
            unpack_all_kinds(message->fields);
        }
    }
    peer = {};
    while (connection.receive())
        while (connection.next()) {}
}
