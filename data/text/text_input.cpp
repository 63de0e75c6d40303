#include "data/text/text_input.h"

#include <algorithm>
#include <cmath>

#include "data/text/parquet.h"

TextInput::TextInput(const std::vector<std::string>& paths, std::optional<TextFormat> format,
                     const std::string& field) {
    std::vector<uint64_t> sizes;
    for (const std::string& path : paths)
        sizes.push_back(sources_.emplace_back(open_text_source(path, format, field)).size);
    set_sizes(sizes);
}

void TextInput::set_sizes(const std::vector<uint64_t>& sizes) {
    begins_ = {0};
    for (size_t i = 0; i < sources_.size(); i++) {
        sources_[i].size = sizes[i];
        begins_.push_back(begins_.back() + sizes[i]);
    }
}

void TextInput::count(const Advance& advance) {
    std::vector<uint64_t> sizes;
    for (const TextSource& source : sources_) {
        uint64_t& size = sizes.emplace_back(source.size);
        if (size > 0) continue;
        if (source.format == TextFormat::parquet) {
            ParquetColumn column(source.file, source.field);
            size = skip_values(column, UINT64_MAX, advance);
            continue;
        }
        ByteSource bytes(source.file);
        for (size_t some; (some = bytes.peek(1).size()) > 0; bytes.skip(some)) advance(some);
        size = bytes.position();
    }
    set_sizes(sizes);
}

uint64_t TextInput::held_out_begin(double fraction) const {
    const uint64_t position = uint64_t(std::floor((1 - fraction) * double(size())));
    for (size_t i = 0; i < sources_.size(); i++)
        if (position < begins_[i + 1]) return begins_[i] + next_record(sources_[i], position - begins_[i]);
    return size();
}

void TextInput::visit(const TextBlock& block, const TextVisitor& visit) const {
    const TextSource& source = sources_[block.source];
    if (source.format == TextFormat::text) return visit(block.bytes(), block.starts_document);
    if (source.format == TextFormat::parquet) {
        size_t begin = 0;
        for (size_t length : block.lengths) {
            visit(block.bytes().substr(begin, length), true);
            begin += length;
        }
        return;
    }
    visit_json_lines(source, block.begin - begins_[block.source], block.bytes(),
                     [&](std::string_view document) { visit(document, true); });
}

void TextInput::read(uint64_t begin, uint64_t end, const TextVisitor& to_visit) const {
    TextReader reader(*this, begin, end, begin);
    for (TextBlock block; reader.next(block);) visit(block, to_visit);
}

// ---------------------------------------------------------------------------------------------------------------------

TextReader::TextReader(const TextInput& input, uint64_t begin, uint64_t end, uint64_t start)
    : input_(input), begin_(begin), end_(end), position_(start) {}

// Opens the source that contains position_. Returns false at the end.
bool TextReader::open_next() {
    const std::vector<TextSource>& sources = input_.sources();
    while (source_ < sources.size() && position_ >= input_.source_begin(source_) + sources[source_].size) source_++;
    if (position_ >= end_ || source_ == sources.size()) return false;
    const TextSource& source = sources[source_];
    const uint64_t from = position_ - input_.source_begin(source_);
    if (source.format != TextFormat::parquet) {
        bytes_.emplace(source.file);
        bytes_->skip(std::max(from, source.content));
        return true;
    }
    column_ = std::make_shared<ParquetColumn>(source.file, source.field);
    skip_values(*column_, from, [](uint64_t) {});
    value_ = column_->next();
    return true;
}

bool TextReader::next(TextBlock& block) {
    block = {};
    while (bytes_ || column_ || open_next()) {
        block.source = source_;
        if (bytes_ ? next_bytes(block) : next_values(block)) {
            position_ = block.end;
            return true;
        }
        bytes_.reset();
        column_.reset();
        position_ = std::max(position_, std::min(end_, input_.source_begin(source_) + input_.sources()[source_].size));
    }
    return false;
}

bool TextReader::next_bytes(TextBlock& block) {
    const TextSource& source = input_.sources()[source_];
    const uint64_t begin = input_.source_begin(source_);
    const size_t length = next_piece(source, *bytes_, std::min(source.size, end_ - begin));
    if (length == 0) return false;
    const std::string_view piece = bytes_->peek(length).substr(0, length);
    if (bytes_->is_mapped())
        block.mapped = piece;
    else
        block.copied = piece;
    block.begin = begin + bytes_->position();
    block.starts_document = block.begin == begin_ || bytes_->position() == source.content;
    bytes_->skip(length);
    block.end = begin + bytes_->position();
    return true;
}

bool TextReader::next_values(TextBlock& block) {
    block.begin = block.end = position_;
    while (value_ && block.end < end_ && block.copied.size() < kTextPieceBytes) {
        block.copied += *value_;
        block.lengths.push_back(value_->size());
        block.end += value_->size() + 1;
        value_ = column_->next();
    }
    return !block.lengths.empty();
}
