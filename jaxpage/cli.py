"""The `jaxpage` command and its subcommands. Options are the fields of the config classes."""

import argparse
import dataclasses
import importlib.metadata
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxpage.aot.gpu_compiler import find_gpu_compiler
from jaxpage.bench import serve as bench_serve
from jaxpage.bench.benches import BENCHES
from jaxpage.chat.connection import HttpConnection
from jaxpage.chat.options import add_chat_arguments, api_key_of, talk
from jaxpage.config import EngineConfig, flag
from jaxpage.errors import ConfigError, JaxpageError
from jaxpage.options import add_fields, config_of, read_config_file
from jaxpage.sampling_params import SamplingParams
from jaxpage.server_config import BATCH_OPTIONS, ServerConfig


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. Errors that users can mend are one line without a traceback."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if "run" not in args:
        parser.print_help()
        return 0
    try:
        code: int = args.run(args)
    except JaxpageError as error:
        print(f"jaxpage: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:  # whoever read our output has left; what is still in its buffer goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxpage",
        description="Serve large language models with JAX. MODEL is a packaged model (smollm2-135m), a Hugging Face "
        "directory or a GGUF file.",
    )
    parser.add_argument("--version", action="version", version=f"jaxpage {importlib.metadata.version('jaxpage')}")
    commands = parser.add_subparsers(metavar="COMMAND")
    serve = _command(commands, "serve", _serve, "start the OpenAI-compatible server")
    serve.add_argument("model_argument", nargs="?", metavar="MODEL", help="model to serve (smollm2-135m)")
    serve.add_argument("--model", default=argparse.SUPPRESS, metavar="MODEL", help="the same, as an option")
    serve.add_argument(
        "--config", metavar="FILE", help="YAML file with any of these options by name; the command line goes before it"
    )
    add_fields(serve.add_argument_group("server"), ServerConfig)
    add_fields(serve.add_argument_group("engine"), EngineConfig, skip=("model",))

    generate = _command(commands, "generate", _generate, "complete prompts in the terminal")
    generate.add_argument(
        "--prompt", action="append", required=True, metavar="P", help="text to complete; may be repeated"
    )
    generate.add_argument("--chat", action="store_true", help="take each prompt as a user's message in a chat")
    generate.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt instead of streaming text"
    )
    sampling = generate.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=int, default=128, metavar="N", help="most tokens to generate (%(default)s)"
    )
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (%(default)s)")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling (%(default)s: off)")
    sampling.add_argument(
        "--top-k", type=int, default=0, metavar="K", help="most probable tokens only (%(default)s: off)"
    )
    sampling.add_argument(
        "--min-p", type=float, default=0.0, metavar="P", help="least share of the best (%(default)s: off)"
    )
    sampling.add_argument("--sampling-seed", type=int, metavar="S", help="seed of the draws")
    sampling.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated"
    )
    sampling.add_argument("--ignore-eos", action="store_true", help="go on past end-of-sequence tokens")
    add_fields(generate.add_argument_group("engine"), EngineConfig)

    chat = _command(commands, "chat", _chat, "talk with a model in the terminal")
    add_chat_arguments(chat)
    add_fields(chat.add_argument_group("engine, unless a URL is asked"), EngineConfig, skip=("model",))

    batch = _command(commands, "run-batch", _run_batch, "run a file of requests, as OpenAI's batch API takes it")
    batch.add_argument("model_argument", nargs="?", metavar="MODEL", help="model to ask (smollm2-135m)")
    batch.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests, a line each; - for stdin")
    batch.add_argument(
        "-o", "--output-file", required=True, metavar="FILE", help="results, which a next run adds to; - for stdout"
    )
    skipped = [field.name for field in dataclasses.fields(ServerConfig) if field.name not in BATCH_OPTIONS]
    add_fields(batch.add_argument_group("server"), ServerConfig, skip=skipped)
    add_fields(batch.add_argument_group("engine"), EngineConfig)

    compiling = _command(commands, "compile", _compile, "compile all programs for GPUs, which need not be here")
    compiling.add_argument(
        "--target", required=True, choices=("b200", "h200", "h100", "a100", "cpu"), help="cpu: this machine's"
    )
    compiling.add_argument("--out", required=True, metavar="FOLDER", help="new folder, for `serve --programs FOLDER`")
    add_fields(compiling.add_argument_group("engine"), EngineConfig, skip=("programs", "compile_cache_dir"))

    models = _command(commands, "models", _models, "list what can be served")
    models.add_argument("--json", action="store_true", help="print one JSON object")

    _add_benches(commands)
    return parser


def _add_benches(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure", description="Measure the engine on this machine.")
    benches = bench.add_subparsers(required=True, metavar="WHAT")
    for name, it in BENCHES.items():
        one = _command(benches, name, _bench, it.help)
        one.set_defaults(bench=it.run)
        one.add_argument("--num-prompts", type=int, default=it.num_prompts, metavar="N", help="requests (%(default)s)")
        one.add_argument(
            "--input-len", type=int, default=it.input_len, metavar="N", help="prompt tokens of each (%(default)s)"
        )
        one.add_argument(
            "--output-len", type=int, default=it.output_len, metavar="N", help="output tokens of each (%(default)s)"
        )
        one.add_argument("--repeat", type=int, default=1, metavar="N", help="runs; medians are printed (%(default)s)")
        for option, default in it.milliseconds.items():
            name, what = flag(option), option.removesuffix("_ms")
            one.add_argument(name, type=float, default=default, metavar="MS", help=f"of a {what}'s work (%(default)s)")
        one.set_defaults(milliseconds=tuple(it.milliseconds))
        one.add_argument("--json", action="store_true", help="print one JSON object")
        add_fields(one.add_argument_group("engine"), EngineConfig)
    serve_bench = _command(benches, "serve", _bench_serve, "what clients of a server see, and what it costs the server")
    bench_serve.add_arguments(serve_bench)
    engine = serve_bench.add_argument_group("engine, where the bench starts the server")
    add_fields(engine, EngineConfig, skip=("seed",))
    roof = _command(benches, "roofline", _roofline, "what a GPU could reach at best, and what compiled steps move")
    roof.add_argument("--target", default="h200", choices=("b200", "h200", "h100", "a100"), help="GPU (%(default)s)")
    roof.add_argument(
        "--batch", type=int, nargs="+", default=[1, 32, 256], metavar="N", help="decoding rows (1 32 256)"
    )
    roof.add_argument("--context", type=int, default=1024, metavar="N", help="positions of each row (%(default)s)")
    roof.add_argument("--json", action="store_true", help="print one JSON object")
    add_fields(roof.add_argument_group("engine"), EngineConfig)


def _command(commands: Any, name: str, run: Any, help_text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=help_text, description=help_text[0].upper() + help_text[1:] + "."
    )
    parser.set_defaults(run=run)
    return parser


def _serve(args: argparse.Namespace) -> int:
    given = vars(args)
    if args.model_argument is not None:
        given.setdefault("model", args.model_argument)
    from_file = read_config_file(args.config, (EngineConfig, ServerConfig)) if args.config is not None else {}
    args = argparse.Namespace(**from_file | given)
    engine_config = config_of(EngineConfig, args)
    if engine_config.process_id:
        from jaxpage.engine.follower import follow

        return follow(engine_config)
    from jaxpage.server.serve import serve

    return serve(engine_config, config_of(ServerConfig, args))


def _compile(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING)
    if args.target != "cpu":
        find_gpu_compiler()
    from jaxpage.aot.compile import compile_programs

    return compile_programs(config_of(EngineConfig, args), args.target, Path(args.out))


def _generate(args: argparse.Namespace) -> int:
    from jaxpage.llm import LLM

    logging.basicConfig(level=logging.WARNING)
    params = SamplingParams(
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        seed=args.sampling_seed,
        max_tokens=args.max_tokens,
        stop=tuple(args.stop),
        ignore_eos=args.ignore_eos,
    )
    with LLM(**_options(args)) as llm:
        prompts: list[Any] = args.prompt
        if args.chat:
            prompts = [llm.tokenizer.encode_chat([{"role": "user", "content": text}]) for text in args.prompt]
        if args.json:
            for text, output in zip(args.prompt, llm.generate(prompts, params), strict=True):
                completion = output.outputs[0]
                metrics = dataclasses.asdict(output.metrics) | {
                    "time_to_first_token": output.metrics.time_to_first_token
                }
                found = {
                    "prompt": text,
                    "text": completion.text,
                    "token_ids": completion.token_ids,
                    "finish_reason": completion.finish_reason,
                    "metrics": metrics,
                }
                print(json.dumps(found, ensure_ascii=False))
        else:
            for prompt in prompts:
                shown = 0
                for output in llm.stream(prompt, params):
                    print(output.outputs[0].text[shown:], end="", flush=True)
                    shown = len(output.outputs[0].text)
                print()
    return 0


def _chat(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING)
    given = _options(args)
    if args.url is not None:
        if given:
            raise ConfigError(f"{flag(next(iter(given)))} is for an engine in process: leave it out, or --url")
        return talk(HttpConnection(args.url, api_key_of(args)), args)
    from jaxpage.async_engine import AsyncEngine
    from jaxpage.server.in_process import LocalServer

    # One request at a time needs few programs, and those that compile meanwhile would tell of it in the chat.
    alone = {"max_num_seqs": 1, "background_compile": False}
    config = EngineConfig(**alone | given | ({} if args.model_argument is None else {"model": args.model_argument}))
    if sys.stderr.isatty():
        print(f"loading {config.model}", file=sys.stderr)
    with LocalServer(lambda: AsyncEngine(config), ServerConfig(log_requests=False)) as local:
        args.model_argument = None
        return talk(local, args)


def _run_batch(args: argparse.Namespace) -> int:
    from jaxpage.server.batch.run import run_batch

    if args.model_argument is not None:
        args.model = args.model_argument
    server_config = config_of(ServerConfig, args, log_requests=False, max_stored_responses=0)
    return run_batch(config_of(EngineConfig, args), server_config, args.input_file, args.output_file)


def _models(args: argparse.Namespace) -> int:
    from jaxpage.models.registry import list_models

    found = list_models()
    if args.json:
        print(json.dumps(found))
        return 0
    for family, architectures in found["families"].items():
        print(f"family {family:13} {', '.join(architectures)}")
    for name, what in found["formats"].items():
        print(f"format {name:13} {what}")
    print(f"packaged             {', '.join(found['packaged'])}")
    print(f"your own             {found['own']}")
    return 0


def _bench(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING)
    for name in ("num_prompts", "input_len", "output_len", "repeat"):
        if getattr(args, name) < 1:
            print(f"jaxpage: {flag(name)} is {getattr(args, name)}: it must be at least 1", file=sys.stderr)
            return 2
    milliseconds = {option: getattr(args, option) for option in args.milliseconds}
    for option, value in milliseconds.items():
        if not 0 <= value <= 10_000:
            print(f"jaxpage: {flag(option)} is {value}: it must be in [0, 10000]", file=sys.stderr)
            return 2
    result: dict[str, Any] = args.bench(
        _options(args),
        num_prompts=args.num_prompts,
        input_len=args.input_len,
        output_len=args.output_len,
        repeat=args.repeat,
        **milliseconds,
    )
    _print_result(result, as_json=args.json)
    return 0


def _bench_serve(args: argparse.Namespace) -> int:
    _print_result(bench_serve.run(args, _options(args)), as_json=args.json)
    return 0


def _print_result(result: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:28} {value:.3f}" if isinstance(value, float) else f"{name:28} {value}")


def _roofline(args: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.WARNING)
    find_gpu_compiler()
    from jaxpage.bench.roofline import roofline, show

    for name, values in (("batch", args.batch), ("context", [args.context])):
        if min(values) < 1:
            raise ConfigError(f"--{name} is {min(values)}: it must be at least 1")
    largest = max(*args.batch, 4)
    config = EngineConfig(**({"max_num_seqs": largest} | _options(args))).sized("gpu")
    if config.max_num_seqs < largest:
        raise ConfigError(f"--max-num-seqs is {config.max_num_seqs}, and --batch asks for {largest}: raise it")
    found = roofline(config, args.target, args.batch, args.context)
    print(json.dumps(found) if args.json else show(found, args.target))
    return 0


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that were given."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    return {name: value for name, value in vars(args).items() if name in names}
