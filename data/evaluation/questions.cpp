#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/evaluation/questions.h"

#include <pcre2.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "data/text/byte_source.h"
#include "data/tokenizer/encoder.h"
#include "data/tokenizer/white_space.h"
#include "runtime/io/files.h"
#include "runtime/io/json.h"
#include "runtime/io/reject_file.h"

namespace {

using Json = nlohmann::ordered_json;

// Replaces every match of a pattern in UTF-8 text. \U and \L in the replacement change the case.
class Substitution {
public:
    Substitution(const std::string& pattern, std::string replacement)
        : replacement_(std::move(replacement)), pattern_(nullptr, pcre2_code_free) {
        int error = 0;
        size_t offset = 0;
        pattern_.reset(pcre2_compile(PCRE2_SPTR(pattern.data()), pattern.size(), PCRE2_UTF, &error, &offset, nullptr));
        require(pattern_ != nullptr, "PCRE2 error %d at character %zu of %s", error, offset, pattern);
    }

    std::string operator()(const std::string& text) const {
        std::string out(4 * text.size() + 64, '\0');  // more than the result of any replacement below
        size_t length = out.size();
        const int count = pcre2_substitute(pattern_.get(), PCRE2_SPTR(text.data()), text.size(), 0,
                                           PCRE2_SUBSTITUTE_GLOBAL | PCRE2_SUBSTITUTE_EXTENDED, nullptr, nullptr,
                                           PCRE2_SPTR(replacement_.data()), replacement_.size(),
                                           reinterpret_cast<PCRE2_UCHAR*>(out.data()), &length);
        require(count >= 0, "PCRE2 error %d", count);
        out.resize(length);
        return out;
    }

private:
    std::string replacement_;
    std::unique_ptr<pcre2_code, void (*)(pcre2_code*)> pattern_;
};

// Counts the code points of UTF-8 text.
int characters_of(std::string_view text) {
    return int(std::ranges::count_if(text, [](char c) { return (uint8_t(c) & 0xc0) != 0x80; }));
}

// A question as text.
struct TextQuestion {
    std::string context;
    std::vector<std::string> choices;
    int label = 0;
};

// One line of a file. The accessors fail with Exit::data, naming the file, line and field.
class Record {
public:
    Record(const std::string& path, size_t line, std::string_view text)
        : place_(format("line %zu", line)),
          path_(path),
          json_(parse_json(text, format("line %zu of %s", line, path.c_str()), Exit::data)) {
        if (!json_.is_object()) reject_file(path_, "%s must be an object, but is %s", place_, printed(json_));
    }

    bool has(const char* name) const { return json_.contains(name); }

    // Returns the only one of these fields that exists. Fails if none or several exist.
    const char* name_of(std::initializer_list<const char*> names) const {
        const char* found = nullptr;
        std::string all;
        for (const char* name : names) {
            all += (all.empty() ? "\"" : " or \"") + std::string(name) + "\"";
            if (!has(name)) continue;
            if (found) reject_file(path_, "%s has both \"%s\" and \"%s\"", place_, found, name);
            found = name;
        }
        if (!found) reject_file(path_, "%s has no %s", place_, all);
        return found;
    }

    std::string text(const char* name) const {
        if (!has(name)) reject_file(path_, "%s has no \"%s\"", place_, name);
        if (!json_[name].is_string()) reject_field(name, "text");
        return json_[name];
    }

    std::vector<std::string> choices(const char* name) const {
        const Json& list = json_[name];
        const bool are_texts =
            list.is_array() && std::ranges::all_of(list, [](auto& text) { return text.is_string(); });
        if (!are_texts || list.size() < 2) reject_field(name, "a list of at least two texts");
        return list.get<std::vector<std::string>>();
    }

    // Returns the label: a number, or a string of digits as in the Hugging Face data sets.
    int label(const char* name, size_t choices) const {
        const Json& value = json_[name];
        for (size_t i = 0; i < choices; i++)
            if (value == i || value == std::to_string(i)) return int(i);
        reject_field(name, format("an integer from 0 to %zu", choices - 1));
    }

    [[noreturn]] void reject(const std::string& sentence) const { reject_file(path_, "%s: %s", place_, sentence); }

private:
    [[noreturn]] void reject_field(const char* name, const std::string& expected) const {
        reject_file(path_, "%s: \"%s\" must be %s, but is %s", place_, name, expected, printed(json_[name]));
    }

    std::string place_;
    const std::string& path_;
    Json json_;
};

std::string content_of(const MappedFile& file) {
    ByteSource bytes(file);
    std::string content;
    for (std::string_view some; !(some = bytes.peek(1)).empty(); bytes.skip(some.size())) content += some;
    return content;
}

}  // namespace

// Formats and tokenizes questions as lm-evaluation-harness does.
class QuestionReader::TextEncoder {
public:
    explicit TextEncoder(const Tokenizer& tokenizer) : tokenizer_(tokenizer), encoder_(tokenizer) {}

    TextQuestion text_of(const Record& record) const {
        const bool is_hellaswag = record.has("ctx_a") || record.has("activity_label");
        const char* const context = is_hellaswag ? "ctx_a" : record.name_of({"context", "question", "query"});
        const char* const choices = is_hellaswag ? "endings" : record.name_of({"choices", "endings"});
        const char* const label = is_hellaswag ? "label" : record.name_of({"label", "gold"});
        for (const char* name : {choices, label}) record.name_of({name});
        TextQuestion question{record.text(context), record.choices(choices), 0};
        question.label = record.label(label, question.choices.size());
        if (!is_hellaswag) return question;
        question.context = clean(record.text("activity_label") + ": " + question.context + " " +
                                 lowered_(capitalized_(record.text("ctx_b"))));
        for (std::string& choice : question.choices) choice = clean(choice);
        return question;
    }

    MultipleChoice encode(const TextQuestion& text, const Record& record) {
        const std::string context(right_stripped(text.context));
        const std::string space = text.context.substr(context.size()) + " ";
        MultipleChoice question{
            .context = encoder_.encode(context), .completions = {}, .label = text.label, .characters = {}};
        const size_t begin = question.context.size();
        for (size_t i = 0; i < text.choices.size(); i++) {
            const std::vector<int32_t> whole = encoder_.encode(context + space + text.choices[i]);
            if (whole.size() <= begin)
                record.reject(format("choice %zu adds no token to the context", i));
            question.completions.emplace_back(whole.begin() + ptrdiff_t(begin), whole.end());
            question.characters.push_back(characters_of(text.choices[i]));
        }
        if (begin == 0) question.context = {tokenizer_.document_start()};
        return question;
    }

private:
    std::string clean(const std::string& text) const {
        return single_spaced_(unbracketed_(titled_(std::string(stripped(text)))));
    }

    const Tokenizer& tokenizer_;
    Encoder encoder_;
    const Substitution titled_{" \\[title\\]", ". "};
    const Substitution unbracketed_{"\\[[^\\]\\n]*\\]", ""};
    const Substitution single_spaced_{"  ", " "};
    const Substitution capitalized_{"(?s)\\A.", "\\U$0"};
    const Substitution lowered_{"(?s)(?<=.).+", "\\L$0"};  // all but the first character
};

void QuestionReader::read_json_lines(const MappedFile& file, size_t limit, QuestionSet& set) {
    const std::string content = content_of(file);
    size_t number = 0;
    for (size_t begin = 0, end; begin < content.size(); begin = end + 1) {
        end = std::min(content.find('\n', begin), content.size());
        const std::string_view line = std::string_view(content).substr(begin, end - begin);
        number++;
        if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
        const Record record(set.path, number, line);
        if (!encoder_) encoder_ = std::make_unique<TextEncoder>(*tokenizer_);
        const TextQuestion question = encoder_->text_of(record);
        if (limit == 0 || set.questions.size() < limit) set.questions.push_back(encoder_->encode(question, record));
    }
    if (set.questions.empty()) reject_file(set.path, "the file has no questions");
}

QuestionReader::QuestionReader(const Tokenizer* tokenizer) : tokenizer_(tokenizer) {}
QuestionReader::~QuestionReader() = default;

QuestionSet QuestionReader::read(const std::string& path, size_t limit) {
    QuestionSet set;
    set.path = path;
    set.name = std::filesystem::path(path).filename();
    set.name = set.name.substr(0, set.name.find('.', 1));
    std::ranges::replace_if(
        set.name, [](char c) { return !std::isalnum(uint8_t(c)) && c != '-'; }, '_');
    const MappedFile file(path);
    if (!tokenizer_) fail(Exit::no_input, "%s has text, which requires a tokenizer", path);
    read_json_lines(file, limit, set);
    for (const MultipleChoice& question : set.questions)
        for (const std::vector<int32_t>& completion : question.completions)
            set.completion_tokens = std::max(set.completion_tokens, int(completion.size()));
    return set;
}
