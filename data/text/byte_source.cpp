#include "data/text/byte_source.h"

#include <isa-l.h>
#include <snappy-c.h>
#include <zstd.h>

#include <algorithm>

#include "runtime/io/reject_file.h"

static constexpr size_t kDecodedAtOnce = size_t(1) << 16;
static constexpr std::string_view kGzipMagic = "\x1f\x8b", kZstdMagic = "\x28\xb5\x2f\xfd";

namespace {

class GzipDecoder : public ByteSource::Decoder {
public:
    explicit GzipDecoder(const MappedFile& file) : path_(file.path()), rest_(file.text()) { begin_member(); }

    bool decode_more(std::string& out) override {
        if (state_.block_state == ISAL_BLOCK_FINISH) {
            rest_.remove_prefix(given_ - state_.avail_in);
            given_ = state_.avail_in = 0;
            // Some tools pad the end of a file with zeros.
            if (rest_.find_first_not_of('\0') == std::string_view::npos) return false;
            begin_member();
        }
        if (state_.avail_in == 0) {
            rest_.remove_prefix(given_);
            given_ = std::min(rest_.size(), size_t(1) << 30);
            state_.next_in = reinterpret_cast<uint8_t*>(const_cast<char*>(rest_.data()));
            state_.avail_in = uint32_t(given_);
        }
        const size_t before = out.size();
        out.resize(before + kDecodedAtOnce);
        state_.next_out = reinterpret_cast<uint8_t*>(out.data() + before);
        state_.avail_out = uint32_t(kDecodedAtOnce);
        const int result = isal_inflate(&state_);
        out.resize(out.size() - state_.avail_out);
        if (result < 0) reject_file(path_, "damaged gzip data (ISA-L error %d)", result);
        const bool is_stuck = out.size() == before && state_.avail_in == 0 && given_ == rest_.size();
        if (is_stuck && state_.block_state != ISAL_BLOCK_FINISH)
            reject_file(path_, "the gzip data is incomplete: the file was cut short");
        return true;
    }

private:
    void begin_member() {
        if (!rest_.starts_with(kGzipMagic))
            reject_file(path_, "the %zu bytes after the end of the gzip data are not gzip data", rest_.size());
        isal_inflate_init(&state_);
        state_.crc_flag = ISAL_GZIP;  // parses the header and verifies the trailer
    }

    std::string path_;
    std::string_view rest_;  // input, starting with the last chunk given to state_
    size_t given_ = 0;
    inflate_state state_;
};

class ZstdDecoder : public ByteSource::Decoder {
public:
    explicit ZstdDecoder(const MappedFile& file)
        : path_(file.path()), input_{file.data(), file.size(), 0}, stream_(ZSTD_createDStream(), ZSTD_freeDStream) {
        if (!stream_) fail(Exit::os, "%s: out of memory for zstd", path_);
    }

    bool decode_more(std::string& out) override {
        const size_t before = out.size();
        if (input_.pos == input_.size && is_between_frames_) return false;
        out.resize(before + kDecodedAtOnce);
        ZSTD_outBuffer output{out.data() + before, kDecodedAtOnce, 0};
        const size_t left = ZSTD_decompressStream(stream_.get(), &output, &input_);
        out.resize(before + output.pos);
        if (ZSTD_isError(left)) reject_file(path_, "damaged zstd data (%s)", ZSTD_getErrorName(left));
        is_between_frames_ = left == 0;
        if (output.pos == 0 && input_.pos == input_.size && !is_between_frames_)
            reject_file(path_, "the zstd data is incomplete: the file was cut short");
        return true;
    }

private:
    std::string path_;
    ZSTD_inBuffer input_;
    std::unique_ptr<ZSTD_DStream, size_t (*)(ZSTD_DStream*)> stream_;
    bool is_between_frames_ = true;
};

}  // namespace

ByteSource::ByteSource(const MappedFile& file) : file_(file) {
    if (file.text().starts_with(kGzipMagic)) decoder_ = std::make_shared<GzipDecoder>(file);
    if (file.text().starts_with(kZstdMagic)) decoder_ = std::make_shared<ZstdDecoder>(file);
}

std::string_view ByteSource::peek(size_t count) {
    if (is_mapped()) return file_.text().substr(position_);
    if (buffer_.size() - buffer_begin_ < count) {
        buffer_.erase(0, buffer_begin_);
        buffer_begin_ = 0;
        while (buffer_.size() < count && decoder_->decode_more(buffer_)) {}
    }
    return std::string_view(buffer_).substr(buffer_begin_);
}

void ByteSource::skip(uint64_t count) {
    while (count > 0) {
        const size_t step = std::min<uint64_t>(count, peek(1).size());
        if (step == 0) return;
        if (decoder_) buffer_begin_ += step;
        position_ += step;
        count -= step;
    }
}

bool decompress_gzip(std::string_view bytes, size_t size, std::string& out) {
    constexpr size_t kMaxPerByte = 1032;
    if (size / kMaxPerByte > bytes.size()) return false;
    out.resize(size);
    inflate_state state;
    isal_inflate_init(&state);
    state.crc_flag = ISAL_GZIP;
    state.next_in = reinterpret_cast<uint8_t*>(const_cast<char*>(bytes.data()));
    state.avail_in = uint32_t(bytes.size());
    state.next_out = reinterpret_cast<uint8_t*>(out.data());
    state.avail_out = uint32_t(size);
    return isal_inflate(&state) == ISAL_DECOMP_OK && state.avail_out == 0 && state.block_state == ISAL_BLOCK_FINISH;
}

bool decompress_zstd(std::string_view bytes, size_t size, std::string& out) {
    const unsigned long long told = ZSTD_getFrameContentSize(bytes.data(), bytes.size());
    if (told == ZSTD_CONTENTSIZE_ERROR || (told != ZSTD_CONTENTSIZE_UNKNOWN && told > size)) return false;
    out.resize(size);
    return ZSTD_decompress(out.data(), size, bytes.data(), bytes.size()) == size;
}

bool decompress_snappy(std::string_view bytes, size_t size, std::string& out) {
    size_t told = 0;
    if (snappy_uncompressed_length(bytes.data(), bytes.size(), &told) != SNAPPY_OK || told != size) return false;
    constexpr size_t kMaxPerByte = 64;
    if (size / kMaxPerByte > bytes.size()) return false;
    out.resize(size);
    return snappy_uncompress(bytes.data(), bytes.size(), out.data(), &told) == SNAPPY_OK && told == size;
}
