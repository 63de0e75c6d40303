#include "data/evaluation/eval_file.h"

#include <algorithm>
#include <cstring>

#include "data/shards/shards.h"
#include "runtime/io/files.h"
#include "runtime/io/header_word.h"
#include "runtime/io/reject_file.h"

static constexpr size_t kHeaderBytes = 1024;
static constexpr int32_t kEvalMagic = 20240522, kVersion = 1;
static constexpr int32_t kMostQuestions = 65535;  // question numbers have 16 bits
static constexpr uint16_t kBegin = 65535;

namespace {

// Reads the 16-bit words of one question in order.
class QuestionReader {
public:
    // `bytes`: the rest of the file.
    QuestionReader(const MappedFile& file, size_t number, std::string_view bytes)
        : file_(file), path_(file.path()), number_(number), bytes_(bytes) {}

    uint16_t word(const char* field) {
        uint16_t value = 0;
        if (bytes_.size() < 2 * (next_ + 1))
            reject_file(path_, "cut short: ends at byte %zu within question %zu, %s", file_.size(), number_, field);
        std::memcpy(&value, bytes_.data() + 2 * next_++, 2);
        return value;
    }

    void expect(const char* field, size_t expected) {
        const uint16_t value = word(field);
        if (value != expected)
            reject_file(path_, "question %zu: %s is %u, but must be %zu", number_, field, value, expected);
    }

    std::vector<int32_t> tokens(const char* field) {
        const uint16_t count = word(field);
        if (count == 0) reject_file(path_, "question %zu: %s has no tokens", number_, field);
        std::vector<int32_t> ids(count);
        for (int32_t& id : ids) id = word(field);
        return ids;
    }

    size_t bytes_read() const { return 2 * next_; }

private:
    const MappedFile& file_;
    const std::string& path_;
    size_t number_;
    std::string_view bytes_;
    size_t next_ = 0;
};

// Reads the question at the beginning of `rest` and removes its bytes.
MultipleChoice read_question(const MappedFile& file, size_t number, std::string_view& rest) {
    const std::string& path = file.path();
    QuestionReader reader(file, number, rest);
    reader.expect("the start marker", kBegin);
    const uint16_t bytes = reader.word("the length in bytes");
    reader.expect("the question number", number);
    MultipleChoice question;
    question.label = reader.word("the label");
    const uint16_t choices = reader.word("the number of completions");
    if (choices < 2 || question.label >= choices)
        reject_file(path,
                    "question %zu has %u completions and the label %d, but requires two or more completions and a "
                    "label below their number",
                    number, choices, question.label);
    question.context = reader.tokens("the context");
    for (int i = 0; i < choices; i++) question.completions.push_back(reader.tokens(format("completion %d", i).c_str()));
    if (reader.bytes_read() != bytes)
        reject_file(path, "question %zu has %zu bytes, but its header says %u", number, reader.bytes_read(), bytes);
    rest.remove_prefix(bytes);
    return question;
}

}  // namespace

bool is_eval_file(std::string_view first_bytes) { return header_word(first_bytes, 0) == kEvalMagic; }

size_t longest_sequence(const std::vector<MultipleChoice>& questions) {
    size_t longest = 0;
    for (const MultipleChoice& question : questions)
        for (const std::vector<int32_t>& completion : question.completions)
            longest = std::max(longest, question.context.size() + completion.size());
    return longest;
}

std::vector<MultipleChoice> read_eval_file(const std::string& path) {
    const MappedFile file(path);
    const std::string_view bytes = file.text();
    const int32_t version = header_word(bytes, 1), count = header_word(bytes, 2), longest = header_word(bytes, 3);
    if (!is_eval_file(bytes) || bytes.size() < kHeaderBytes)
        reject_file(path, "not a complete llm.c eval file: it has %zu bytes and looks like %s", bytes.size(),
                    describe_content(bytes.substr(0, kHeaderBytes), bytes.size()));
    if (version != kVersion)
        reject_file(path, "llm.c eval file of version %d; only version %d is supported", version, kVersion);
    if (count < 1 || count > kMostQuestions)
        reject_file(path, "header word 2 (number of questions) is %d, but must be from 1 to %d", count, kMostQuestions);
    std::vector<MultipleChoice> questions;
    std::string_view rest = bytes.substr(kHeaderBytes);
    size_t most_bytes = 0;
    for (int i = 0; i < count; i++) {
        const size_t before = rest.size();
        questions.push_back(read_question(file, size_t(i), rest));
        most_bytes = std::max(most_bytes, before - rest.size());
    }
    if (!rest.empty())
        reject_file(path, "%d questions end at byte %zu, but the file has %zu bytes", count, bytes.size() - rest.size(),
                    bytes.size());
    if (size_t(longest) != most_bytes)
        reject_file(path, "header word 3 (bytes of the longest question) is %d, but the longest question has %zu",
                    longest, most_bytes);
    return questions;
}

void check_vocabulary(const std::vector<MultipleChoice>& questions, int vocab_size, const std::string& path) {
    for (size_t i = 0; i < questions.size(); i++) {
        int32_t largest = std::ranges::max(questions[i].context);
        for (const std::vector<int32_t>& completion : questions[i].completions)
            largest = std::max(largest, std::ranges::max(completion));
        if (largest >= vocab_size)
            reject_file(path, "question %zu has the token %d, but the vocabulary has %d tokens", i, largest,
                        vocab_size);
    }
}
