#include <CLI/App.hpp>
#include <nlohmann/json.hpp>

#include "commands/app_description.h"
#include "runtime/config/config.h"

namespace {

using Json = nlohmann::ordered_json;

constexpr const char* kBash = R"sh(# bash completion of train_gpt, made by `train_gpt --completion bash`
_train_gpt() {
    local rest=${COMP_LINE:0:COMP_POINT} words=() i trimmed word value prefix='' found=()
    # bash also splits words at = and :, so join the parts that no space separates.
    for ((i = 0; i <= COMP_CWORD; i++)); do
        trimmed=${rest#"${rest%%[![:space:]]*}"}
        if ((i < COMP_CWORD)); then word=${COMP_WORDS[i]}; else word=$trimmed; fi
        if ((i > 0)) && [[ $trimmed == "$rest" ]]; then words[-1]+=$word; else words+=("$word"); fi
        rest=${trimmed#"$word"}
    done
    word=${words[-1]}
    # bash replaces only the part after the last = or :.
    if [[ $COMP_WORDBREAKS == *=* ]]; then prefix=${word%"${word##*[=:]}"}; fi
    while IFS=$'\t' read -r value _; do
        if [[ $value == :files* ]]; then
            compopt -o filenames
            mapfile -t found < <(compgen -f -X "!${value#:files }" -- "${word##*[=:]}"; compgen -d -- "${word##*[=:]}")
            COMPREPLY+=("${found[@]}")
        else
            COMPREPLY+=("${value:${#prefix}}")
            [[ $value != *= ]] || compopt -o nospace
        fi
    done < <("${words[0]/#\~/$HOME}" --complete "${words[@]:1}" 2> /dev/null)
}
complete -F _train_gpt train_gpt train_gpt_cpu
)sh";

constexpr const char* kZsh = R"sh(#compdef train_gpt train_gpt_cpu
# zsh completion of train_gpt, made by `train_gpt --completion zsh`
_train_gpt() {
    local line value
    local -a plain keys
    for line in ${(f)"$(${words[1]/#\~/$HOME} --complete "${(@)words[2,CURRENT-1]}" "$PREFIX" 2> /dev/null)"}; do
        value=${line%%$'\t'*}
        case $value in
            (:files*) compset -P '*='; _files -g "${value#:files }" ;;
            (*=) keys+=("${value//:/\\:}:${line#*$'\t'}") ;;
            (*) plain+=("${value//:/\\:}:${line#*$'\t'}") ;;
        esac
    done
    (( ! $#plain )) || _describe -V 'train_gpt' plain
    (( ! $#keys )) || _describe -V 'configuration key' keys -S ''
}
if [[ $funcstack[1] == _train_gpt ]]; then _train_gpt "$@"; else compdef _train_gpt train_gpt train_gpt_cpu; fi
)sh";

constexpr const char* kFish = R"sh(# fish completion of train_gpt, made by `train_gpt --completion fish`
function __train_gpt_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    set -l program (string replace -r '^~' $HOME -- $words[1])
    for line in ($program --complete $words[2..-1] "$current" 2> /dev/null)
        if string match -q ':files*' -- $line
            set -l prefix (string match -r '.*=' -- "$current")
            for path in (__fish_complete_path (string replace -r '.*=' '' -- "$current"))
                echo "$prefix$path"
            end
        else
            echo $line
        end
    end
end
complete -c train_gpt -f -a '(__train_gpt_complete)'
complete -c train_gpt_cpu -f -a '(__train_gpt_complete)'
)sh";

bool takes_value(const CLI::Option& option) { return option.get_items_expected_min() > 0; }

std::vector<std::string> split(const std::string& text, char separator) {
    std::vector<std::string> parts;
    std::istringstream stream(text);
    for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
    return parts;
}

// Collects the lines of completions() that begin with the typed text.
class Candidates {
public:
    explicit Candidates(std::string typed) : typed_(std::move(typed)) {}
    void add(const std::string& word, const std::string& help = "") {
        if (word.compare(0, typed_.size(), typed_) == 0) lines_ += word + "\t" + help + "\n";
    }
    void add_files(const std::string& pattern) { lines_ += ":files " + pattern + "\n"; }
    const std::string& typed() const { return typed_; }
    const std::string& lines() const { return lines_; }

private:
    std::string typed_, lines_;
};

// Adds section.key= for every key, or the values of a key that has been typed; each is preceded by `before`.
void add_assignments(Candidates& candidates, const std::string& before) {
    const Json sections = Json::parse(config_schema())["properties"];
    for (const auto& [section, object] : sections.items()) {
        if (!object.contains("properties")) continue;  // "$schema"
        for (const auto& [name, schema] : object["properties"].items()) {
            const std::string assignment = before + section + "." + name + "=";
            const std::string help = schema["description"];
            if (candidates.typed().compare(0, assignment.size(), assignment) != 0) {
                candidates.add(assignment, help);
            } else if (schema.contains("enum")) {
                for (const Json& choice : schema["enum"]) candidates.add(assignment + choice.get<std::string>(), help);
            } else if (schema["type"] == "boolean") {
                for (const char* choice : {"true", "false"}) candidates.add(assignment + choice, help);
            } else if (schema["type"] == "string" || schema["type"].is_array()) {
                candidates.add_files("*");
            }
        }
    }
}

// Adds what may follow `before` ("" or "--option="): the words in the option's type ({a,b} or a|b|FILE), or files.
void add_values(Candidates& candidates, const CLI::Option& option, const std::string& before) {
    if (option.check_name("--set")) return add_assignments(candidates, before);
    const std::string type = option.get_type_name();
    const size_t open = type.find('{'), close = type.find('}');
    if (open != std::string::npos && close != std::string::npos) {
        for (const std::string& word : split(type.substr(open + 1, close - open - 1), ','))
            candidates.add(before + word);
    } else if (type.find('|') != std::string::npos) {
        for (const std::string& word : split(type, '|'))
            if (word == "FILE")
                candidates.add_files("*");
            else
                candidates.add(before + word);
    } else if (type.compare(0, 4, "TEXT") == 0) {
        candidates.add_files(option.check_name("CONFIG") ? "*.json" : "*");
    }
}

// The positional argument number `index`, from 0; the last one if it may be repeated. Null if there is none.
const CLI::Option* positional(const CLI::App& app, size_t index) {
    const CLI::Option* last = nullptr;
    for (const CLI::Option* option : app.get_options()) {
        if (option->nonpositional()) continue;
        last = option;
        if (index-- == 0) return last;
    }
    return last && last->get_items_expected_max() > 1 ? last : nullptr;
}

}  // namespace

std::string completion_script(const std::string& shell) {
    return shell == "bash" ? kBash : shell == "zsh" ? kZsh : kFish;
}

std::string completions(const CLI::App& program, const std::vector<std::string>& words) {
    const CLI::App* app = &program;
    const CLI::Option* pending = nullptr;  // the option that takes the next word as its value
    size_t positionals = 0;
    auto commands = [&] {
        return app->get_subcommands([](const CLI::App* command) { return !command->get_name().empty(); });
    };
    auto option_of = [&](const std::string& word) { return app->get_option_no_throw(word.substr(0, word.find('='))); };
    for (size_t i = 0; i + 1 < words.size(); i++) {
        const std::string& word = words[i];
        if (pending) {
            pending = nullptr;
        } else if (word[0] == '-') {
            const CLI::Option* option = option_of(word);
            if (option && takes_value(*option) && word.find('=') == std::string::npos) pending = option;
        } else {
            const CLI::App* command = nullptr;
            for (const CLI::App* known : commands())
                if (positionals == 0 && known->get_name() == word) command = known;
            command ? void(app = command) : void(positionals++);
        }
    }

    Candidates candidates(words.empty() ? "" : words.back());
    const std::string& typed = candidates.typed();
    const size_t equals = typed[0] == '-' ? typed.find('=') : std::string::npos;
    if (pending) {
        add_values(candidates, *pending, "");
    } else if (equals != std::string::npos) {
        if (const CLI::Option* option = option_of(typed)) add_values(candidates, *option, typed.substr(0, equals + 1));
    } else if (typed[0] == '-') {
        for (const CLI::Option* option : app->get_options())
            for (const std::string& name : option->get_lnames()) candidates.add("--" + name, option->get_description());
    } else {
        if (positionals == 0)
            for (const CLI::App* command : commands()) candidates.add(command->get_name(), command->get_description());
        if (const CLI::Option* option = positional(*app, positionals)) add_values(candidates, *option, "");
    }
    return candidates.lines();
}
