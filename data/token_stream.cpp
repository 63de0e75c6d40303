#include "data/token_stream.h"

#include <algorithm>
#include <filesystem>

#include "data/digest.h"
#include "data/reject_file.h"
#include "kernels/check.h"

TokenStream::TokenStream(const std::vector<std::string>& paths, int vocab_size) : vocab_size_(vocab_size) {
    begins_.push_back(0);
    for (const std::string& path : paths) {
        shards_.emplace_back(path);
        begins_.push_back(begins_.back() + shards_.back().token_count());
    }
}

uint64_t TokenStream::window_count(int seq_len) const {
    return token_count() == 0 ? 0 : (token_count() - 1) / uint64_t(seq_len);
}

void TokenStream::read(uint64_t position, size_t count, int32_t* out) const {
    require(position <= token_count() && count <= token_count() - position, "tokens: no tokens [%llu, %llu) of %llu",
            (unsigned long long)position, (unsigned long long)(position + count), (unsigned long long)token_count());
    size_t shard = size_t(std::upper_bound(begins_.begin(), begins_.end(), position) - begins_.begin()) - 1;
    for (; count > 0; shard++) {
        uint64_t begin = position - begins_[shard];
        size_t part = size_t(std::min<uint64_t>(count, shards_[shard].token_count() - begin));
        shards_[shard].copy(begin, part, out);
        for (size_t i = 0; i < part; i++)
            if (uint32_t(out[i]) >= uint32_t(vocab_size_))
                reject_file(shards_[shard].path(), "token %llu is %u, but the vocabulary has %d tokens",
                            (unsigned long long)(begin + i), uint32_t(out[i]), vocab_size_);
        position += part, count -= part, out += part;
    }
}

static std::string base_name(const std::string& path) { return std::filesystem::path(path).filename(); }

static void add_content(Digest& digest, std::string_view bytes) {
    constexpr size_t kWholeBytes = size_t(4) << 20, kEndBytes = size_t(1) << 20, kBlockBytes = 4096, kBlocks = 64;
    if (bytes.size() <= kWholeBytes) return digest.add(bytes);
    std::string_view middle = bytes.substr(kEndBytes, bytes.size() - 2 * kEndBytes);
    size_t stride = (middle.size() - kBlockBytes) / (kBlocks - 1);
    digest.add(bytes.substr(0, kEndBytes));
    for (size_t block = 0; block < kBlocks; block++) digest.add(middle.substr(block * stride, kBlockBytes));
    digest.add(bytes.substr(bytes.size() - kEndBytes));
}

std::string TokenStream::digest() const {
    Digest digest;
    for (const TokenShard& shard : shards_) {
        std::string name = base_name(shard.path());
        digest.add_number(name.size());
        digest.add_number(shard.bytes().size());
        digest.add(name);
        add_content(digest, shard.bytes());
    }
    return digest.hex();
}

std::string TokenStream::description() const {
    if (shards_.empty()) return "no shard";
    std::string first = base_name(shards_.front().path());
    return shards_.size() == 1 ? first : format("%s and %zu more", first.c_str(), shards_.size() - 1);
}
