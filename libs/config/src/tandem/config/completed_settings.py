"""The completion of settings by a shell: a function in its language, made from the schema."""

from __future__ import annotations

from tandem.config.conform import list_choices_of_keys
from tandem.config.unsupported import NOT_SUPPORTED_YET

_BASH = """
_tandem_settings() {{
  local key="" word="$1"
  # Bash takes words apart at '='.
  if [[ "$word" == "=" ]]; then key="${{COMP_WORDS[COMP_CWORD-1]}}" word=""
  elif [[ "${{COMP_WORDS[COMP_CWORD-1]}}" == "=" ]]; then key="${{COMP_WORDS[COMP_CWORD-2]}}"
  else compgen -W '{keys}' -- "$word"; return
  fi
  case "$key" in
{cases}
  esac
}}
"""
_ZSH = """
_tandem_settings() {{
  if [[ "$PREFIX" == *=* ]]; then
    local key="${{PREFIX%%=*}}"
    compset -P '*='
    case "$key" in
{cases}
    esac
  else
    compadd -S '' -- {keys}
    # Of several folders behind an option, zsh takes the second for a setting.
    (( ${{words[(I)--model]}} )) && _files -/
  fi
}}
"""
_FISH = """
function _tandem_settings
  if string match -q '*=*' -- (commandline -ct)
    printf '%s\\n' {values}
  else
    printf '%s\\n' {keys}
    # Of several folders behind an option, fish takes the second for a setting.
    contains -- --model (commandline -opc); and __fish_complete_directories (commandline -ct) ''
  end
end
"""


def complete_word(shell: str) -> str:
    """Return the shell's function `_tandem_settings`, which completes a word: a key, or the value behind one."""
    keys, choices = _list_settings()
    listed = " ".join(f"{key}=" for key in keys)
    quoted = " ".join(f"'{key}='" for key in keys)
    match shell:
        case "bash":
            cases = "\n".join(
                f"  {key}) compgen -W '{' '.join(words)}' -- \"$word\" ;;" for key, words in choices.items()
            )
            return _BASH.format(keys=listed, cases=cases)
        case "zsh":
            cases = "\n".join(f"    {key}) compadd -- {' '.join(words)} ;;" for key, words in choices.items())
            return _ZSH.format(keys=quoted, cases=cases)
        case _:
            values = " ".join(f"'{key}={word}'" for key, words in choices.items() for word in words)
            return _FISH.format(keys=quoted, values=values)


def _list_settings() -> tuple[list[str], dict[str, list[str]]]:
    """Return the keys that have a value of their own, and the values of those that have few."""
    choices = dict(list_choices_of_keys())
    for row in NOT_SUPPORTED_YET:  # offer no value that would be rejected
        if all(word in choices.get(row.key, []) for word in row.off):
            choices[row.key] = [str(word) for word in row.off]
    return [*choices], {key: words for key, words in choices.items() if words}
