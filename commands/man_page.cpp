#include <CLI/App.hpp>
#include <regex>

#include "commands/app_description.h"
#include "kernels/base/check.h"
#include "runtime/config/config.h"

namespace {

// Escapes text for roff, where a backslash begins an escape, and a dot or apostrophe at the start of a line a request.
std::string roff(const std::string& text) {
    std::string escaped;
    for (char c : text) {
        if (c == '\\')
            escaped += "\\e";
        else if (c == '-')
            escaped += "\\-";
        else
            escaped += c;
    }
    return (escaped[0] == '.' || escaped[0] == '\'' ? "\\&" : "") + escaped;
}

std::string bold(const std::string& text) { return "\\fB" + roff(text) + "\\fR"; }
std::string italic(const std::string& text) { return "\\fI" + roff(text) + "\\fR"; }

// A list entry: a term and its meaning.
std::string entry(const std::string& term, const std::string& meaning) {
    return ".TP\n" + term + "\n" + meaning + "\n";
}

// "TEXT", "INT", "bash|zsh|fish", from CLI11's "TEXT:{bash,zsh,fish}" and "INT:INT in [1 - 1024]".
std::string value_name(const CLI::Option& option) {
    const std::string type = option.get_type_name();
    const size_t open = type.find('{'), close = type.find('}');
    if (open != std::string::npos && close != std::string::npos)
        return std::regex_replace(type.substr(open + 1, close - open - 1), std::regex(","), "|");
    return type.substr(0, type.find(':'));
}

std::string entries_of(const CLI::App& app) {
    std::string text;
    for (const CLI::Option* option : app.get_options()) {
        std::string term = option->nonpositional() ? "" : italic(option->get_name());
        for (const std::string& name : option->get_snames()) term += (term.empty() ? "" : ", ") + bold("-" + name);
        for (const std::string& name : option->get_lnames()) term += (term.empty() ? "" : ", ") + bold("--" + name);
        if (option->nonpositional() && option->get_items_expected_max() > 0) term += " " + italic(value_name(*option));
        std::string meaning = roff(option->get_description());
        if (!option->get_default_str().empty()) meaning += roff(" (default: " + option->get_default_str() + ")");
        text += entry(term, meaning);
    }
    return text;
}

// The usage line of a command: its required options and its positional arguments, with optional ones in brackets.
std::string synopsis(const CLI::App& app, const std::string& name) {
    std::string line = bold(name);
    for (const CLI::Option* option : app.get_options())
        if (option->nonpositional()) {
            if (option->get_required()) line += " " + bold(option->get_name());
        } else {
            const std::string more = option->get_items_expected_max() > 1 ? "..." : "";
            line += " " + (option->get_required() ? italic(option->get_name() + more)
                                                  : "[" + italic(option->get_name() + more) + "]");
        }
    return line + " [" + italic("options") + "]\n";
}

// The keys from config_help(), which prints two lines per key: "KEY  help" and "  default and range".
std::string configuration_keys() {
    std::istringstream lines(config_help());
    std::string text;
    for (std::string first, second; std::getline(lines, first) && std::getline(lines, second);) {
        const size_t key_end = first.find(' '), help = first.find_first_not_of(' ', key_end);
        text += entry(bold(first.substr(0, key_end)),
                      roff(first.substr(help)) + "\n.br\n" + roff(second.substr(second.find_first_not_of(' '))));
    }
    return text;
}

}  // namespace

std::string man_page(const CLI::App& app, const std::string& version) {
    std::smatch found;
    const bool is_dated = std::regex_search(version, found, std::regex("\\d{4}-\\d\\d-\\d\\d"));
    const std::string name = app.get_name();
    const auto commands = app.get_subcommands([](const CLI::App* command) { return !command->get_name().empty(); });
    std::string page = ".TH TRAIN_GPT 1 \"" + (is_dated ? found.str() : "") + "\" \"" + name + " " +
                       version.substr(0, version.find(' ')) + "\" \"User Commands\"\n";
    page += ".SH NAME\n" + name + ", train_gpt_cpu \\- pretrain GPT\\-class language models\n.SH SYNOPSIS\n";
    page += synopsis(app, name);
    for (const CLI::App* command : commands) page += ".br\n" + synopsis(*command, name + " " + command->get_name());
    page += ".SH DESCRIPTION\n" + roff(app.get_description()) + "\nOne JSON file describes a run. " +
            bold("train_gpt_cpu") + " is the build for machines without a GPU.\n";
    page += ".SH OPTIONS\n" + entries_of(app) + ".SH COMMANDS\n";
    for (const CLI::App* command : commands)
        page += ".SS " + name + " " + command->get_name() + "\n" + roff(command->get_description()) + ".\n" +
                entries_of(*command);
    page += ".SH CONFIGURATION\nThe keys of a configuration file and of " + bold("--set") + ", by section.\n" +
            configuration_keys();
    page += ".SH EXIT STATUS\n" + bold("retry") + " and " + bold("restart") +
            " mean that starting the same run again may succeed.\n";
    for (const ExitCode& row : kExitCodes)
        page += entry(bold(std::to_string(int(row.code))), roff(std::string(row.meaning) + " (" + row.policy + ")"));
    return page;
}
