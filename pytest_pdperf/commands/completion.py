"""`pdperf completion`: shell completion as a script made from the parser, so that it knows every option."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

SHELLS = ("bash", "zsh", "fish")
EXAMPLES = """\
examples:
  source <(pdperf completion bash)
  pdperf completion zsh > ~/.zfunc/_pdperf
  pdperf completion fish > ~/.config/fish/completions/pdperf.fish
"""


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "completion",
        help="print a completion script for your shell",
        description="Prints a script that completes subcommands and options.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the script. Returns 0."""
    from pytest_pdperf.cli import build_parser

    print({"bash": bash, "zsh": zsh, "fish": fish}[arguments.shell](options_of(build_parser())))
    return 0


def options_of(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Subcommand -> its words: options, and choices of its arguments. The parser's own are under the empty name."""
    found: dict[str, list[str]] = {"": _words(parser)}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {name: _words(sub) for name, sub in action.choices.items()}
    return found


def _words(parser: argparse.ArgumentParser) -> list[str]:
    words: list[str] = []
    for action in parser._actions:
        words += [option for option in action.option_strings if option.startswith("--")]
        if action.choices is not None and not action.option_strings:
            words += [str(choice) for choice in action.choices]
    return words


def bash(options: Mapping[str, Sequence[str]]) -> str:
    """Completion for bash: subcommands, options, and files for everything else."""
    cases = "\n".join(
        f'        {name}) words="{" ".join(words)}" ;;' for name, words in options.items() if name
    )
    return f"""\
_pdperf() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words="{" ".join(options[""])}"
    if (( COMP_CWORD > 1 )); then
        case "${{COMP_WORDS[1]}}" in
{cases}
        *) words="" ;;
        esac
    fi
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    if (( COMP_CWORD > 1 )) && [[ "$current" != -* ]]; then
        mapfile -t -O "${{#COMPREPLY[@]}}" COMPREPLY < <(compgen -f -- "$current")
    fi
}}
complete -o filenames -F _pdperf pdperf"""


def zsh(options: Mapping[str, Sequence[str]]) -> str:
    """Completion for zsh, through its bash compatibility."""
    plain = (
        bash(options)
        .replace("mapfile -t COMPREPLY < <(", 'COMPREPLY=( ${(f)"$(')
        .replace(' -- "$current")\n    if', ' -- "$current")"} )\n    if')
    )
    plain = plain.replace(
        'mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$current")',
        'COMPREPLY+=( ${(f)"$(compgen -f -- "$current")"} )',
    )
    return f"#compdef pdperf\nautoload -U +X bashcompinit && bashcompinit\n{plain}"


def fish(options: Mapping[str, Sequence[str]]) -> str:
    """Completion for fish."""
    lines = []
    for name, words in options.items():
        where = "__fish_use_subcommand" if not name else f"__fish_seen_subcommand_from {name}"
        for word in words:
            spelled = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            lines.append(f"complete -c pdperf -n '{where}' {spelled}")
    return "\n".join(lines)
