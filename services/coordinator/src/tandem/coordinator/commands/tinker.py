"""``coordinator tinker``: serve the Tinker API, by which clients drive trainers and engines."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.common.errors import OK, ConfigError
from tandem.coordinator.commands.arguments import Commands, add_config, count, number
from tandem.serving.tinker.access import DEFAULT_FILE, add_key, read_keys, read_tls

if TYPE_CHECKING:
    from tandem.launch.preparing.beginning import Mode

_KEYS = "keys"
_MOST_TOKENS = 1 << 24
_MOST_MODELS = 256
_MOST_PUBLISHED = 64
_NUM_PUBLISHED = {True: 4, False: 2}
"""Published versions that are kept unless `--versions` says otherwise: of adapters, and of whole models."""
_MOST_RECORDED_GB = 10.0
_UNENCRYPTED = (
    "note: requests and keys travel unencrypted: give --tls-cert and --tls-key, or put a TLS proxy before this server"
)


def add(commands: Commands) -> None:
    """Declare the command."""
    tinker = commands.add_parser(
        "tinker",
        help="serve the Tinker API: clients train and sample by single calls",
        description="Serve the Tinker API with the trainers and engines of CONFIG, which needs no data and no "
        "environment. `coordinator tinker keys NAME` makes an API key, and prints it once.",
    )
    add_config(tinker)
    tinker.add_argument("--port", type=int, default=8010, help="port to listen on; 0: any free one (default: 8010)")
    tinker.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    tinker.add_argument(
        "--keys", type=Path, default=DEFAULT_FILE, metavar="FILE", help=f"file of API keys (default: {DEFAULT_FILE})"
    )
    tinker.add_argument(
        "--states",
        type=Path,
        metavar="FOLDER",
        help="folder of what save_weights saves, which outlives the server (default: logger.log_dir, and _tinker)",
    )
    tinker.add_argument(
        "--tls-cert",
        type=Path,
        metavar="FILE",
        help="certificate, and those that lead to its CA, by which to serve HTTPS",
    )
    tinker.add_argument("--tls-key", type=Path, metavar="FILE", help="the certificate's private key, with mode 0600")
    tinker.add_argument(
        "--tokens",
        type=int,
        default=_MOST_TOKENS,
        help="most tokens of samples and gradients that a key may have in progress (default: %(default)s)",
    )
    tinker.add_argument(
        "--models",
        type=int,
        default=1,
        help="most models to train at a time; with adapters alone may it be more than 1 (default: %(default)s)",
    )
    tinker.add_argument(
        "--versions",
        type=count,
        metavar="N",
        help="published versions of each model that trainers keep in memory to sample from; a further one replaces "
        f"the one used longest ago (default: {_NUM_PUBLISHED[True]} of adapters, {_NUM_PUBLISHED[False]} of models)",
    )
    tinker.add_argument(
        "--record",
        type=number("from 0 on", lambda gigabytes: gigabytes >= 0),
        default=_MOST_RECORDED_GB,
        metavar="GB",
        help="most gigabytes of the record of calls, from which `coordinator replay` trains again; 0: no record "
        "(default: %(default)s)",
    )
    tinker.add_argument("--restart", action="store_true", help="set an earlier run in the run folder aside")
    tinker.set_defaults(carry_out=_tinker)


def _tinker(arguments: argparse.Namespace) -> int:
    if arguments.config == _KEYS:
        if len(arguments.overrides) != 1:
            raise ConfigError("coordinator tinker keys NAME: give one name")
        print(add_key(arguments.keys, arguments.overrides[0]))
        return OK
    if arguments.tokens < 1:
        raise ConfigError(f"--tokens {arguments.tokens}: must be at least 1")
    if not 1 <= arguments.models <= _MOST_MODELS:
        raise ConfigError(f"--models {arguments.models}: must be from 1 to {_MOST_MODELS}")
    if (arguments.versions or 1) > _MOST_PUBLISHED:
        raise ConfigError(f"--versions {arguments.versions}: must be from 1 to {_MOST_PUBLISHED}")
    keys = read_keys(arguments.keys)
    tls = read_tls(arguments.tls_cert, arguments.tls_key)
    from tandem.common.network import is_loopback, url_of
    from tandem.coordinator.tinker.driving import load
    from tandem.coordinator.tinker.serving import ServingTerms, listen, serve

    config = load(arguments.config, arguments.overrides, arguments.models)
    if arguments.models > 1 and config.policy.adapters is None:
        raise ConfigError(
            f"--models {arguments.models}: all weights are trained, and those of one model at a time; several share "
            "the weights under their adapters (policy.dtensor_cfg.lora_cfg, or policy.megatron_cfg.peft)"
        )
    states = arguments.states or Path(f"{config.logger.log_dir.rstrip('/')}_tinker")
    mode: Mode = "restart" if arguments.restart else "new"
    with listen(arguments.host, arguments.port) as listening:
        if tls is None and not is_loopback(listening.getsockname()[0]):
            print(_UNENCRYPTED, flush=True)
        terms = ServingTerms(
            listening=listening,
            url=url_of(listening, "http" if tls is None else "https"),
            tls=tls,
            most_tokens=arguments.tokens,
            most_models=arguments.models,
            most_published=arguments.versions or _NUM_PUBLISHED[config.policy.adapters is not None],
            most_recorded=int(arguments.record * 1e9),
        )
        return serve(arguments.config, config, mode, keys, states, terms)
