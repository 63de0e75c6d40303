#include "data/text_input.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "data/pretokenizer.h"
#include "data/reject_file.h"

static constexpr size_t kLongestPieceBytes = 64 * kTextPieceBytes;

TextInput::TextInput(const std::vector<std::string>& paths) {
    for (const std::string& path : paths) {
        const MappedFile& file = files_.emplace_back(path);
        const std::string_view start = file.text().substr(0, size_t(1) << 16);
        if (size_t nul = start.find('\0'); nul != std::string_view::npos)
            reject_file(path, "not a text file: byte %zu is 0; it looks like %s", nul,
                        describe_content(start.substr(0, 1024), file.size()));
        begins_.push_back(size() + file.size());
    }
}

uint64_t TextInput::held_out_begin(double fraction) const {
    uint64_t position = uint64_t(std::floor((1 - fraction) * double(size())));
    for (size_t i = 0; i < files_.size(); i++) {
        if (position >= begins_[i + 1]) continue;
        if (position == begins_[i]) return position;
        size_t newline = files_[i].text().find('\n', size_t(position - begins_[i]) - 1);
        return newline == std::string_view::npos ? begins_[i + 1] : begins_[i] + newline + 1;
    }
    return size();
}

// Length of the next piece of a document.
static size_t piece_length(std::string_view text) {
    if (text.size() <= kTextPieceBytes) return text.size();
    for (size_t length = kTextPieceBytes; length < kLongestPieceBytes && length < text.size(); length *= 2)
        if (size_t cut = last_safe_cut(text.substr(0, length))) return cut;
    return std::min(text.size(), kLongestPieceBytes);
}

static void visit_document(std::string_view text, const TextVisitor& visit) {
    size_t begin = 0;
    do {
        const size_t length = piece_length(text.substr(begin));
        visit(text.substr(begin, length), begin == 0);
        begin += length;
    } while (begin < text.size());
}

static void visit_json_lines(const MappedFile& file, size_t begin, size_t end, const TextVisitor& visit) {
    const std::string& path = file.path();
    size_t number = size_t(std::ranges::count(file.text().substr(0, begin), '\n'));
    for (size_t line_end; begin < end; begin = line_end + 1) {
        number++;
        line_end = std::min(file.text().find('\n', begin), end);
        const std::string_view line = file.text().substr(begin, line_end - begin);
        if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
        if (line.size() > kMaxJsonLineBytes)
            reject_file(path, "line %zu has %zu bytes; the limit is %zu", number, line.size(), kMaxJsonLineBytes);
        const nlohmann::ordered_json json =
            parse_json(line, format("the JSON in line %zu of %s", number, path.c_str()), Exit::data);
        if (!json.contains("text") || !json["text"].is_string())
            reject_file(path, "line %zu is not a JSON object with a string \"text\"", number);
        visit_document(json["text"].get_ref<const std::string&>(), visit);
    }
}

void TextInput::read(uint64_t begin, uint64_t end, const TextVisitor& visit) const {
    for (size_t i = 0; i < files_.size(); i++) {
        uint64_t first = std::max(begin, begins_[i]), last = std::min(end, begins_[i + 1]);
        if (first >= last) continue;
        size_t from = size_t(first - begins_[i]), to = size_t(last - begins_[i]);
        if (files_[i].path().ends_with(".jsonl"))
            visit_json_lines(files_[i], from, to, visit);
        else
            visit_document(files_[i].text().substr(from, to - from), visit);
    }
}
