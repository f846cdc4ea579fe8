# Completion of kvpoolctl for bash. Commands and options come from its --help, pools and regions from the daemon.

# The line up to the cursor as kvpoolctl will see it, in the caller's `words`: readline takes --kind=ring apart.
__kvpoolctl_words() {
  local i glue=0
  words=()
  for ((i = 0; i <= COMP_CWORD; i++)); do
    if [[ ${COMP_WORDS[i]} == = && ${words[-1]} == --* ]]; then
      words[-1]+="="
      glue=1
    elif ((glue)); then
      words[-1]+=${COMP_WORDS[i]}
      glue=0
    else
      words+=("${COMP_WORDS[i]}")
    fi
  done
}

# Options of the caller's `words` that decide which daemon is asked.
__kvpoolctl_daemon() {
  local i
  for ((i = 1; i < ${#words[@]} - 1; i++)); do
    case ${words[i]} in
      -s | --socket) printf '%s\n' --socket "${words[i + 1]}" ;;
      --socket=*) printf '%s\n' --socket "${words[i]#*=}" ;;
      -s?*) printf '%s\n' --socket "${words[i]#-s}" ;;
    esac
  done
}

__kvpoolctl_ask() {
  local daemon
  mapfile -t daemon < <(__kvpoolctl_daemon)
  kvpoolctl "${daemon[@]}" --timeout 1000 "$@" 2>/dev/null
}

# "info", "pool create", ... one a line
__kvpoolctl_commands() {
  kvpoolctl --help 2>/dev/null | sed -n 's/^  \([a-z][a-z]*\( [a-z][a-z]*\)\{0,1\}\)  .*/\1/p'
}

__kvpoolctl_options() {
  kvpoolctl "$@" --help 2>/dev/null | sed -n 's/^ *\(-[a-z], *\)\{0,1\}\(--[a-z-]*\).*/\2/p' | sort -u
}

__kvpoolctl_reply() {
  mapfile -t COMPREPLY < <(compgen -W "$1" -- "$2")
}

# The value of an option, if that is what stands there. False: it isn't.
__kvpoolctl_value() {
  case $1 in
    -s | --socket | --root) mapfile -t COMPREPLY < <(compgen -f -- "$2") ;;
    --kind) __kvpoolctl_reply "paged ring" "$2" ;;
    --as) __kvpoolctl_reply "bf16 float32 float16 record memory" "$2" ;;
    --timeout | --block-size | --blocks | --placement | --region | --namespace | --first-block | --count | --rows | --slots | --name | \
      --device | --tokens | --table | --per-block | --destination | --ratio | --sequence | --window | --ring | \
      --chunk | --ranks | --seed) ;;
    *) return 1 ;;
  esac
}

_kvpoolctl() {
  local words current commands command=() i arguments=0
  COMPREPLY=()
  __kvpoolctl_words
  current=${words[-1]}
  if [[ $current == --*=* ]]; then
    __kvpoolctl_value "${current%%=*}" "${current#*=}"
    # Where readline doesn't take the word apart, all of it is replaced.
    [[ $COMP_WORDBREAKS == *=* ]] || COMPREPLY=("${COMPREPLY[@]/#/${current%%=*}=}")
    return
  fi
  ! __kvpoolctl_value "${words[-2]}" "$current" || return
  commands=$(__kvpoolctl_commands)
  # The command is one word, or two; what stands before it are options.
  for ((i = 1; i < ${#words[@]} - 1; i++)); do
    case ${words[i]} in
      -s | --socket | --timeout | --root) ((i++)) ;;
      -*) ;;
      *)
        if [[ ${#command[@]} -eq 0 ]]; then
          command=("${words[i]}")
        elif [[ ${#command[@]} -eq 1 ]] && grep -qx "${command[0]} ${words[i]}" <<<"$commands"; then
          command+=("${words[i]}")
        else
          ((arguments++))
        fi
        ;;
    esac
  done
  if [[ $current == -* ]]; then
    if [[ ${#command[@]} -eq 0 ]]; then
      __kvpoolctl_reply "--socket --timeout --json --help --version" "$current"
    else
      __kvpoolctl_reply "$(__kvpoolctl_options "${command[@]}")" "$current"
    fi
    return
  fi
  case "${command[*]}" in
    "") __kvpoolctl_reply "$(cut -d ' ' -f 1 <<<"$commands" | sort -u)" "$current" ;;
    pool | plan) __kvpoolctl_reply "$(sed -n "s/^${command[0]} //p" <<<"$commands")" "$current" ;;
    blocks | "pool describe" | "pool delete")
      [[ $arguments -gt 0 ]] || __kvpoolctl_reply "$(__kvpoolctl_ask pools --names)" "$current"
      ;;
    put | get | dump)
      if [[ $arguments -eq 0 ]]; then
        __kvpoolctl_reply "$(__kvpoolctl_ask pools --names --regions)" "$current"
      elif [[ ${command[0]} != dump ]]; then
        mapfile -t COMPREPLY < <(compgen -f -- "$current")
      fi
      ;;
  esac
}

complete -F _kvpoolctl kvpoolctl
