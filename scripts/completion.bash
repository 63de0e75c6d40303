# Completes commands, options, keys and values of --set, and file names of train_gpt and train_gpt_cpu in bash.
#
#   source scripts/completion.bash
#
# The words come from the help that the program prints, so they match its version.

# Prints "key=" for every key or, once a key has been typed, "key=value" for its values.
_train_gpt_settings() { # PROGRAM TYPED
    local key allowed value
    # Two lines per key: "KEY HELP" and "default VALUE, ALLOWED".
    "$1" --help-config | while read -r key _ && read -r allowed; do
        allowed=${allowed##*, }
        if [[ $2 != *=* ]]; then
            echo "$key="
        elif [[ $2 == "$key="* && ($allowed == *'|'* || $allowed == 'true or false') ]]; then
            for value in ${allowed//'|'/ }; do
                [ "$value" = or ] || echo "$key=$value"
            done
        fi
    done
}

_train_gpt() {
    # bash splits COMP_WORDS also at = and :, and replaces only the part of a word after the last of them.
    local line=${COMP_LINE:0:COMP_POINT}
    local typed=${line##*[[:space:]]} before='' words word program commands command=() candidates
    read -ra words <<< "${line%"$typed"}"
    program=${words[0]/#\~/$HOME}
    commands=$("$program" --help 2> /dev/null | sed '1,/^Subcommands:/d; s/^  \([a-z-]*\) .*/\1/')
    for word in "${words[@]:1}"; do
        if grep -qxFe "$word" <<< "$commands"; then
            command=("$word")
            break
        fi
    done

    [[ $typed != --set=* ]] || before=--set=
    if [[ $before || ${words[-1]} == --set ]]; then
        candidates=$(_train_gpt_settings "$program" "${typed#"$before"}" 2> /dev/null)
    elif [[ $typed == -* ]]; then
        candidates=$("$program" "${command[@]}" --help 2> /dev/null | sed -nE 's/^  (-.,)?(--[a-z-]+).*/\2/p')
    elif [[ ! ${command[*]} ]]; then
        candidates=$commands
    fi
    mapfile -t COMPREPLY < <(compgen -P "$before" -W "$candidates" -- "${typed#"$before"}")
    [[ ${COMPREPLY[0]} != *= ]] || compopt -o nospace
    [[ $COMP_WORDBREAKS != *=* ]] || COMPREPLY=("${COMPREPLY[@]#"${typed%"${typed##*[=:]}"}"}")
}
# Where nothing fits, complete file names.
complete -o bashdefault -o default -F _train_gpt train_gpt train_gpt_cpu
