# Completion of kvpoolctl for bash. Commands and options come from its --help, pools and regions from the daemon.

# Options of the command line up to the cursor that decide which daemon is asked.
__kvpoolctl_daemon() {
  local i
  for ((i = 1; i < COMP_CWORD; i++)); do
    if [[ ${COMP_WORDS[i]} == -s || ${COMP_WORDS[i]} == --socket ]]; then
      printf '%s\n' --socket "${COMP_WORDS[i + 1]}"
    fi
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

_kvpoolctl() {
  local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} commands command=() i arguments=0
  COMPREPLY=()
  case $previous in
    -s | --socket) mapfile -t COMPREPLY < <(compgen -f -- "$current") && return ;;
    --kind) __kvpoolctl_reply "paged ring" "$current" && return ;;
    --as) __kvpoolctl_reply "bf16 float32 float16 record memory" "$current" && return ;;
    --timeout | --block-size | --blocks | --placement | --region | --first-block | --count | --rows | --slots | --name | \
      --device | --tokens | --table | --per-block | --destination | --ratio | --sequence | --seed) return ;;
  esac
  commands=$(__kvpoolctl_commands)
  # The command is one word, or two; what stands before it are options.
  for ((i = 1; i < COMP_CWORD; i++)); do
    case ${COMP_WORDS[i]} in
      -s | --socket | --timeout) ((i++)) ;;
      -*) ;;
      *)
        if [[ ${#command[@]} -eq 0 ]]; then
          command=("${COMP_WORDS[i]}")
        elif [[ ${#command[@]} -eq 1 ]] && grep -qx "${command[0]} ${COMP_WORDS[i]}" <<<"$commands"; then
          command+=("${COMP_WORDS[i]}")
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
