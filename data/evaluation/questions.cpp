#define PCRE2_CODE_UNIT_WIDTH 8
#include "data/evaluation/questions.h"

#include <pcre2.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "data/text/byte_source.h"
#include "data/tokenizer/white_space.h"
#include "runtime/io/files.h"
#include "runtime/io/joined.h"
#include "runtime/io/json.h"
#include "runtime/io/reject_file.h"

namespace {

using Json = nlohmann::ordered_json;

// Replaces every match of a pattern in UTF-8 text. \U and \L in the replacement change the case.
std::string replaced(const std::string& text, const char* pattern, const char* replacement) {
    int error = 0;
    size_t offset = 0;
    const std::unique_ptr<pcre2_code, void (*)(pcre2_code*)> code(
        pcre2_compile(PCRE2_SPTR(pattern), PCRE2_ZERO_TERMINATED, PCRE2_UTF, &error, &offset, nullptr),
        pcre2_code_free);
    require(code != nullptr, "PCRE2 error %d at character %zu of %s", error, offset, pattern);
    std::string out(4 * text.size() + 64, '\0');  // more than the result of any replacement below
    size_t length = out.size();
    const int count =
        pcre2_substitute(code.get(), PCRE2_SPTR(text.data()), text.size(), 0,
                         PCRE2_SUBSTITUTE_GLOBAL | PCRE2_SUBSTITUTE_EXTENDED, nullptr, nullptr, PCRE2_SPTR(replacement),
                         PCRE2_ZERO_TERMINATED, reinterpret_cast<PCRE2_UCHAR*>(out.data()), &length);
    require(count >= 0, "PCRE2 error %d", count);
    out.resize(length);
    return out;
}

// Returns a text of HellaSwag without its markup.
std::string cleaned(const std::string& text) {
    const std::string titled = replaced(std::string(stripped(text)), " \\[title\\]", ". ");
    return replaced(replaced(titled, "\\[[^\\]\\n]*\\]", ""), "  ", " ");
}

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

// One line of a file. The functions fail with Exit::data, naming the file, line and field.
class Record {
public:
    Record(const std::string& path, size_t line, std::string_view text)
        : place_(format("line %zu", line)),
          path_(path),
          json_(parse_json(text, format("line %zu of %s", line, path.c_str()), Exit::data)) {
        if (!json_.is_object()) reject_file(path_, "%s must be an object, but is %s", place_, printed(json_));
    }

    TextQuestion question() const {
        if (!json_.contains("ctx_a") && !json_.contains("activity_label"))
            return question_of({"context", "question", "query"}, {"choices", "endings"}, {"label", "gold"});
        TextQuestion question = question_of({"ctx_a"}, {"endings"}, {"label"});
        const std::string end = replaced(text({"ctx_b"}), "(?s)\\A(.)(.*)", "\\U$1\\L$2");
        question.context = cleaned(text({"activity_label"}) + ": " + question.context + " " + end);
        for (std::string& choice : question.choices) choice = cleaned(choice);
        return question;
    }

    // Encodes context, a space and a choice as a whole.
    MultipleChoice encoded(const TextQuestion& text, Encoder& encoder, int document_start) const {
        const std::string context(right_stripped(text.context));
        const std::string space = text.context.substr(context.size()) + " ";
        MultipleChoice question{
            .context = encoder.encode(context), .completions = {}, .label = text.label, .characters = {}};
        const size_t begin = question.context.size();
        for (size_t i = 0; i < text.choices.size(); i++) {
            const std::vector<int32_t> whole = encoder.encode(context + space + text.choices[i]);
            if (whole.size() <= begin) reject_file(path_, "%s: choice %zu adds no token to the context", place_, i);
            question.completions.emplace_back(whole.begin() + ptrdiff_t(begin), whole.end());
            question.characters.push_back(characters_of(text.choices[i]));
        }
        if (begin == 0) question.context = {document_start};
        return question;
    }

private:
    using Names = std::initializer_list<const char*>;  // of the same field

    TextQuestion question_of(Names context, Names choices, Names label) const {
        TextQuestion question{text(context), texts(choices), 0};
        question.label = index(label, question.choices.size());
        return question;
    }

    // Returns the only one of these names that exists. Fails if none or several exist.
    const char* name_of(Names names) const {
        const char* found = nullptr;
        for (const char* name : names) {
            if (!json_.contains(name)) continue;
            if (found) reject_file(path_, "%s has both \"%s\" and \"%s\"", place_, found, name);
            found = name;
        }
        if (!found) reject_file(path_, "%s has no \"%s\"", place_, joined(names, "\" or \""));
        return found;
    }

    std::string text(Names names) const {
        const char* const name = name_of(names);
        if (!json_[name].is_string()) reject_field(name, "text");
        return json_[name];
    }

    std::vector<std::string> texts(Names names) const {
        const char* const name = name_of(names);
        const Json& list = json_[name];
        const bool are_texts = list.is_array() && std::ranges::all_of(list, &Json::is_string);
        if (!are_texts || list.size() < 2) reject_field(name, "a list of at least two texts");
        return list.get<std::vector<std::string>>();
    }

    // Returns an index below `count`: a number, or a string of digits as in the Hugging Face data sets.
    int index(Names names, size_t count) const {
        const char* const name = name_of(names);
        for (size_t i = 0; i < count; i++)
            if (json_[name] == i || json_[name] == std::to_string(i)) return int(i);
        reject_field(name, format("an integer from 0 to %zu", count - 1));
    }

    [[noreturn]] void reject_field(const char* name, const std::string& expected) const {
        reject_file(path_, "%s: \"%s\" must be %s, but is %s", place_, name, expected, printed(json_[name]));
    }

    std::string place_;
    const std::string& path_;
    Json json_;
};

std::string content_of(const std::string& path) {
    ByteSource bytes{MappedFile(path)};
    std::string content;
    for (std::string_view some; !(some = bytes.peek(1)).empty(); bytes.skip(some.size())) content += some;
    return content;
}

}  // namespace

QuestionSet QuestionReader::read(const std::string& path, size_t limit) {
    QuestionSet set;
    set.path = path;
    set.name = std::filesystem::path(path).filename();
    set.name = set.name.substr(0, set.name.find('.', 1));
    std::ranges::replace_if(
        set.name, [](char c) { return !std::isalnum(uint8_t(c)) && c != '-'; }, '_');
    const std::string content = content_of(path);
    size_t number = 0;
    for (size_t begin = 0, end; begin < content.size(); begin = end + 1) {
        end = std::min(content.find('\n', begin), content.size());
        const std::string_view line = std::string_view(content).substr(begin, end - begin);
        number++;
        if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
        const Record record(path, number, line);
        const TextQuestion text = record.question();
        if (limit > 0 && set.questions.size() == limit) continue;
        set.questions.push_back(record.encoded(text, encoder_, document_start_));
        for (const std::vector<int32_t>& completion : set.questions.back().completions)
            set.completion_tokens = std::max(set.completion_tokens, int(completion.size()));
    }
    if (set.questions.empty()) reject_file(path, "the file has no questions");
    return set;
}
