"""``coordinator completion``: print the script with which a shell completes the command line."""

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

    from tandem.config.completed_settings import complete_word

    shell: str = arguments.shell
    for action in _actions(arguments.root):
        _prepare(action)
    script = shtab.complete(arguments.root, shell, preamble=complete_word(shell))
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
    from tandem.launch.starting.choices import ALGORITHMS, ENGINES, ENVIRONMENTS, TASKS

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
