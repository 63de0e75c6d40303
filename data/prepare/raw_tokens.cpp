#include "data/prepare/raw_tokens.h"

#include <algorithm>
#include <cstring>

#include "runtime/io/reject_file.h"

uint64_t raw_token_count(const MappedFile& file) {
    if (const auto header = shard_header(file.text()))
        reject_file(file.path(), "has a header: it is a %s, which data.train can use directly", header->name);
    if (file.size() % 2 != 0)
        reject_file(file.path(), "has %zu bytes, but 2-byte token ids need an even number", file.size());
    return file.size() / 2;
}

uint64_t append_raw_tokens(const MappedFile& file, uint64_t begin, uint64_t end, int vocab_size, int eot,
                           ShardWriter& writer, const std::function<void(std::span<const int32_t> ids)>& advance) {
    uint64_t documents = 0;
    std::vector<int32_t> ids;
    for (constexpr uint64_t kAtOnce = uint64_t(1) << 20; begin < end; begin += ids.size()) {
        ids.resize(size_t(std::min(kAtOnce, end - begin)));
        for (size_t i = 0; i < ids.size(); i++) {
            uint16_t id;
            std::memcpy(&id, file.data() + 2 * (begin + i), 2);
            if (id >= vocab_size)
                reject_file(file.path(), "token %zu is %d, but the vocabulary has %d tokens", begin + i, id,
                            vocab_size);
            ids[i] = id;
        }
        documents += uint64_t(std::ranges::count(ids, eot));
        writer.append(ids);
        advance(ids);
    }
    return documents;
}
