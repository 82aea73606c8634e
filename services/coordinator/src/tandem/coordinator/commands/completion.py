"""``coordinator completion``: print the script with which a shell completes commands and keys."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from tandem.common.errors import OK
from tandem.coordinator.commands.arguments import SETTINGS, Commands

SHELLS = ("bash", "zsh", "fish")
_FILES = ("CONFIG", "FILE")
_FOLDERS = ("RUN", "FOLDER")
"""Kinds of arguments, by their metavars."""
_HOW_TO_LOAD = """examples:
  bash:  source <(coordinator completion bash)       in ~/.bashrc
  zsh:   eval "$(coordinator completion zsh)"        in ~/.zshrc, after compinit
  fish:  coordinator completion fish | source        in ~/.config/fish/config.fish"""
_BASH_END = """
# A setting goes on behind its '='.
_tandem_coordinator() {
  _shtab_coordinator
  # Behind an option that takes several folders, settings may stand as well.
  if [[ "${#COMPREPLY[@]}" == 0 && "${COMP_WORDS[1]}" == eval ]]; then
    COMPREPLY=($(_tandem_settings "${COMP_WORDS[COMP_CWORD]}"))
  fi
  if [[ "${COMPREPLY[0]-}" == *= ]]; then compopt -o nospace 2>/dev/null || :; fi
}
complete -o bashdefault -F _tandem_coordinator coordinator
"""
_BASH_SETTINGS = """
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
_ZSH_SETTINGS = """
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
_FISH_SETTINGS = """
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
_MENDED = {
    # shtab registers only an evaluated script, and calls a sourced one at once; this does it the right way round.
    "zsh_eval_context[-1] == eval": "zsh_eval_context[-1] != loadautofunc",
    # The last positional argument, if repeated: shtab has zsh complete only the first one.
    '"(*)::': '"*:',
    '"(*):': '"*:',
}
"""Corrections of shtab's script for zsh."""


def add(commands: Commands) -> None:
    """Declare the command."""
    completion = commands.add_parser(
        "completion",
        help="print the script with which a shell completes commands and keys",
        epilog=_HOW_TO_LOAD,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    completion.add_argument("shell", choices=SHELLS, help="which shell")
    completion.set_defaults(carry_out=_completion)


def _completion(arguments: argparse.Namespace) -> int:
    import shtab

    shell: str = arguments.shell
    for action in _actions(arguments.root):
        _prepare(action)
    script = shtab.complete(arguments.root, shell, preamble=_complete_word(shell))
    if shell == "zsh":
        for written, mended in _MENDED.items():
            script = script.replace(written, mended)
    print(script)
    if shell == "bash":
        print(_BASH_END)
    return OK


def _prepare(action: argparse.Action) -> None:
    """Set the possible values of an argument where argparse does not know them; describe a command by its help."""
    import shtab

    if action.metavar == SETTINGS:
        settings = {"bash": "_tandem_settings", "zsh": "_tandem_settings", "fish": "(_tandem_settings)"}
        action.complete = settings  # type: ignore[attr-defined]
    elif action.metavar in _FILES:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    elif action.metavar in _FOLDERS:
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    elif isinstance(action, argparse._SubParsersAction):
        for command in action._choices_actions:
            action.choices[command.dest].description = command.help
        for option in action.choices["init"]._actions:
            option.choices = _choices_of_init().get(option.dest, option.choices)


def _choices_of_init() -> dict[str, list[str]]:
    """Return the choices of a starting configuration; `coordinator init` itself rejects invalid combinations."""
    from tandem.launch.starting import ALGORITHMS, ENGINES, ENVIRONMENTS, TASKS

    return {
        "algorithm": [*ALGORITHMS],
        "task": [*TASKS],
        "engine": [*ENGINES],
        "environment": [*ENVIRONMENTS],
    }


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _actions(inner)


def _complete_word(shell: str) -> str:
    """Return the shell's function `_tandem_settings`, which completes a word: a key, or the value behind one."""
    keys, choices = _list_settings()
    listed = " ".join(f"{key}=" for key in keys)
    quoted = " ".join(f"'{key}='" for key in keys)
    match shell:
        case "bash":
            cases = "\n".join(
                f"  {key}) compgen -W '{' '.join(words)}' -- \"$word\" ;;" for key, words in choices.items()
            )
            return _BASH_SETTINGS.format(keys=listed, cases=cases)
        case "zsh":
            cases = "\n".join(f"    {key}) compadd -- {' '.join(words)} ;;" for key, words in choices.items())
            return _ZSH_SETTINGS.format(keys=quoted, cases=cases)
        case _:
            values = " ".join(f"'{key}={word}'" for key, words in choices.items() for word in words)
            return _FISH_SETTINGS.format(keys=quoted, values=values)


def _list_settings() -> tuple[list[str], dict[str, list[str]]]:
    """Return the keys that have a value of their own, and the values of those that have few."""
    from tandem.config.conform import list_choices_of_keys
    from tandem.config.unsupported import NOT_SUPPORTED_YET

    choices = dict(list_choices_of_keys())
    for row in NOT_SUPPORTED_YET:  # offer no value that would be rejected
        if all(word in choices.get(row.key, []) for word in row.off):
            choices[row.key] = [str(word) for word in row.off]
    return [*choices], {key: words for key, words in choices.items() if words}
