"""The `rankmoe` command."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from rankmoe import __version__, backend_names
from rankmoe.models.presets import PRESETS

if TYPE_CHECKING:
    from rankmoe.bench.record import Record
    from rankmoe.distributed import ExpertParallelGroup
    from rankmoe.models.presets import ModelPreset
    from rankmoe.tuning import Report

app = typer.Typer(
    help="Route, quantise, schedule and run the experts of large mixture-of-experts models under expert parallelism.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Benchmarks; each writes one JSON record.", no_args_is_help=True)
app.add_typer(bench, name="bench")

_JSON = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
_EP = Annotated[int, typer.Option("--ep", min=1, help="Ranks of the expert-parallel group.")]
_MODEL = Annotated[str, typer.Option("--model", help=f"One of {', '.join(PRESETS)}.")]


def main() -> None:
    """Run the command; a wrong value ends with one line on standard error and exit code 2."""
    try:
        app()
    except ValueError as error:
        print(f"rankmoe: {error}", file=sys.stderr)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(f"rankmoe {__version__}")
        raise typer.Exit


@app.command()
def info(
    model: _MODEL = "kimi-k3",
    ep: _EP = 8,
    batch: Annotated[str, typer.Option(help="Batch sizes, separated by commas.")] = "1,2,4,8,16,32,64",
    tb_per_s: Annotated[
        float, typer.Option("--tb-per-s", min=0.001, help="Memory read speed in TB/s; an H200 reads about 4.5.")
    ] = 4.5,
    as_json: _JSON = False,
) -> None:
    """Show the ranks' ranges, the rank-local problem, bytes, expected load and time floors of a model.

    Example: `rankmoe info --model kimi-k3 --ep 8`
    """
    from rankmoe.info import describe_batch, describe_ranks, why_rank_local
    from rankmoe.models.presets import get_preset

    preset = get_preset(model)
    ranks = describe_ranks(preset, ep)
    batches = [describe_batch(preset, ep, tokens, tb_per_s) for tokens in _numbers("batch", batch)]
    if as_json:
        rank_rows = [{**dataclasses.asdict(rank), "why": why_rank_local(preset, rank)} for rank in ranks]
        _print_json({"model": model, "ep": ep, "ranks": rank_rows, "batches": [dataclasses.asdict(b) for b in batches]})
        return
    console = Console()
    console.print(
        f"[bold]{preset.name}[/]: {preset.num_experts} experts, top-{preset.router.top_k}, {preset.router.scoring} "
        f"routing, hidden {preset.hidden_size}, intermediate {preset.intermediate_size}, "
        f"{preset.num_moe_layers} layers; one expert is {preset.expert_nbytes / 1e6:.2f} MB in MXFP4"
    )
    table = Table("rank", "experts", "count", "rank-local num_experts", "GB a layer", "GB all layers")
    for rank in ranks:
        gigabytes = rank.nbytes_per_layer / 1e9
        table.add_row(
            str(rank.ep_rank),
            _format_range(rank.local_range.offset, rank.local_range.count),
            str(rank.local_range.count),
            str(rank.rank_local_num_experts or f"{preset.num_experts} (global)"),
            f"{gigabytes:.2f}",
            f"{gigabytes * preset.num_moe_layers:.1f}",
        )
    console.print(table)
    console.print(f"On rank 0 {why_rank_local(preset, ranks[0])}.")
    table = Table(
        "tokens",
        "active experts",
        "rows an active expert",
        "MB read",
        "floor, us",
        title=f"rank 0, one layer, uniform routing, memory at {tb_per_s:g} TB/s",
    )
    for item in batches:
        table.add_row(
            str(item.num_tokens),
            f"{item.active_experts:.1f}",
            f"{item.rows_per_active_expert:.2f}",
            f"{item.nbytes / 1e6:.0f}",
            f"{item.floor_us:.1f}",
        )
    console.print(table)


@app.command()
def check(
    seed: Annotated[int, typer.Option(help="Seed of the random logits and weights.")] = 0, as_json: _JSON = False
) -> None:
    """Prove on this machine that rank-local ids follow the rule and change no bit of the MoE output.

    Kimi-K3's routing (896 experts, top-16). Exits with 1 where a comparison fails. Example: `rankmoe check`
    """
    from rankmoe.check import CheckResult, run_checks

    results: list[CheckResult] = []
    console = Console(stderr=True)
    with console.status("checking"):
        results.extend(run_checks(seed))
    passed = all(result.passed for result in results)
    if as_json:
        _print_json({"passed": passed, "checks": [dataclasses.asdict(result) for result in results]})
    else:
        table = Table("compared", "EP", "ranks", "comparisons", "result")
        for result in results:
            outcome = "[green]equal[/]" if result.passed else f"[red]{result.failure}[/]"
            table.add_row(result.name, str(result.ep_size), result.ranks, str(result.num_comparisons), outcome)
        Console().print(table)
        print("every comparison holds" if passed else "FAILED: see the rows above")
    if not passed:
        raise typer.Exit(1)


@app.command()
def generate(
    prompt_file: Annotated[
        Path,
        typer.Option("--prompt-file", exists=True, dir_okay=False, help="Text to continue; its end is the prompt."),
    ],
    tokens: Annotated[int, typer.Option(min=1, help="Bytes to generate for each sequence.")] = 200,
    batch: Annotated[int, typer.Option(min=1, help="Sequences; their prompts end at evenly spaced lines.")] = 1,
    ep: _EP = 1,
    prompt_bytes: Annotated[int, typer.Option(min=1, help="Bytes of prompt for each sequence, at most.")] = 512,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest byte.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws at a temperature above 0.")] = 0,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run again with global ids and on one rank, and compare.")
    ] = False,
    as_json: _JSON = False,
) -> None:
    """Continue a file with the embedded model `nano`, its experts spread over ranks of this machine.

    Also runs under torchrun. With `--verify` exits with 1 unless the two id forms give bitwise equal MoE outputs and
    the ranks' tokens are those of a single rank. Example: `rankmoe generate --prompt-file setup.py --ep 4 --verify`
    """
    from rankmoe import generate as generation
    from rankmoe.distributed import launch
    from rankmoe.models.nano import CHECKPOINT_DIRECTORY, load_config

    config = load_config(CHECKPOINT_DIRECTORY)
    prompts = generation.cut_prompts(prompt_file.read_bytes(), batch, prompt_bytes, tokens, config)
    options = generation.GenerateOptions(tuple(prompts), tokens, temperature, seed, verify)
    title = f"nano on {ep} rank{'s' * (ep > 1)}, {batch} sequence{'s' * (batch > 1)} from {prompt_file.name}"
    on_bytes = None if as_json else _TextStream(title, prompts[0])
    result = launch(generation.generate, ep, options, on_bytes)
    if result is None:  # under torchrun, rank 0 speaks for all
        return
    if as_json:
        _print_json(_generate_json(result))
    else:
        _print_generate(result)
    if result.verification is not None and not result.verification.passed:
        raise typer.Exit(1)


@app.command()
def pack(
    checkpoint: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of the checkpoint.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the files; made where it is missing.")],
    model: _MODEL = "kimi-k3",
    ep_size: Annotated[int, typer.Option("--ep-size", "--ep", min=1, help="Ranks of the expert-parallel group.")] = 1,
    ep_rank: Annotated[int, typer.Option("--ep-rank", min=0, help="The rank whose experts are packed.")] = 0,
    layer: Annotated[
        list[int] | None, typer.Option("--layer", min=0, help="A layer to pack, also several times; all by default.")
    ] = None,
    strategy: Annotated[str, typer.Option(help="How experts are placed: contiguous or round_robin.")] = "contiguous",
    backend: Annotated[
        str, typer.Option(help=f"Whose layout: {', '.join(backend_names())}, or auto, what this machine runs best.")
    ] = "auto",
    device: Annotated[
        str | None, typer.Option(help="Where to pack: cpu, or cuda, the default where there is a GPU for the backend.")
    ] = None,
    as_json: _JSON = False,
) -> None:
    """Pack one rank's experts of a checkpoint, a file for each layer, for `rankmoe.packed.load_packed` to read.

    Reads one expert at a time. With `--backend cuda` a machine without a GPU packs for one that has it. Each file is
    written whole or not at all. Example: `rankmoe pack kimi-k3/ --ep-size 8 --ep-rank 0 --backend cuda --out packed/`
    """
    from rankmoe.checkpoint import progress_bar
    from rankmoe.models.presets import get_preset
    from rankmoe.pack_checkpoint import PackedFile, PackOptions, run

    options = PackOptions(checkpoint, out, get_preset(model), ep_size, ep_rank, layer, strategy, backend, device)
    files: list[PackedFile] = []
    try:
        with progress_bar("packing tensors") as progress:
            files.extend(run(options, progress))
    except OSError as error:
        raise ValueError(f"{error}") from error
    finally:  # also what was written before a fault
        if as_json:
            _print_json([{**dataclasses.asdict(file), "path": str(file.path)} for file in files])
        else:
            for file in files:
                print(
                    f"{file.path}: layer {file.layer}, {file.nbytes:,} bytes for backend {file.backend}, "
                    f"packed in {file.pack_seconds:.2f} s, written in {file.write_seconds:.2f} s"
                )


class _TextStream:
    """Prints the first sequence as its bytes arrive, behind the last lines of its prompt. Runs in rank 0's process."""

    def __init__(self, title: str, prompt: bytes) -> None:
        self.title = title
        self.prompt = prompt
        self.decoder: codecs.IncrementalDecoder | None = None  # made in rank 0's process

    def __call__(self, new_bytes: list[int]) -> None:
        if self.decoder is None:
            self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            console = Console()
            console.print(f"{self.title}; a sequence begins where its prompt ends", highlight=False)
            console.rule("sequence 1, behind its prompt", align="left")
            tail = b"".join(self.prompt.splitlines(keepends=True)[-6:]).lstrip(b"\0")
            console.print(tail.decode(errors="replace"), end="", style="dim", markup=False, highlight=False)
        with contextlib.suppress(BrokenPipeError):  # whoever read this has seen enough; the run goes on
            sys.stdout.write(self.decoder.decode(bytes(new_bytes[:1])))
            sys.stdout.flush()


def _print_generate(result: Any) -> None:
    console = Console()
    console.print()
    for number, text in enumerate(result.texts[1:], start=2):
        console.rule(f"sequence {number}", align="left")
        console.print(text.decode(errors="replace"), markup=False, highlight=False)
    console.rule()
    table = Table("rank", "experts", "rank-local num_experts", "handoff hits", "misses", "tokens/s")
    for rank in result.ranks:
        table.add_row(
            str(rank.ep_rank),
            _format_range(rank.local_range.offset, rank.local_range.count),
            str(rank.rank_local_num_experts or "global"),
            str(rank.handoff_hits),
            str(rank.handoff_misses),
            f"{rank.tokens_per_s:.1f}",
        )
    console.print(table)
    if result.verification is not None:
        for line in verification_lines(result.verification, len(result.ranks)):
            console.print(line, highlight=False)


def verification_lines(verification: Any, ep_size: int) -> list[str]:
    """What `generate --verify` says, a line each."""
    from rankmoe.generate import NEAR_TIE

    forms = "[green]bitwise equal[/]" if verification.forms_agree else "[red]NOT EQUAL[/]"
    lines = [
        f"rank-local against global ids: {verification.num_equal_outputs} of {verification.num_outputs} MoE outputs "
        f"bitwise equal; {verification.num_right_id_tensors} of {verification.num_id_tensors} packed id tensors as the "
        f"reference has them in their form: {forms}",
    ]
    ranks = "[green]agree[/]" if verification.ranks_agree else "[red]DIFFER[/]"
    differing = [step for step in verification.first_differences if step is not None]
    if not differing:
        detail = "the same tokens"
    else:
        gaps = ", ".join(f"{gap:.4f}" for gap in verification.gaps)
        detail = (
            f"first different tokens at step {', '.join(map(str, differing))}, where the two candidates' logits are "
            f"{gaps} apart (a near tie is below {NEAR_TIE:g})"
        )
    lines.append(
        f"EP {ep_size} against EP 1: {detail}; largest logit difference before that "
        f"{verification.max_logit_difference:.2g}: {ranks}"
    )
    return lines


def _generate_json(result: Any) -> dict[str, Any]:
    verification = result.verification
    return {
        "texts": [text.decode(errors="replace") for text in result.texts],
        "ranks": [dataclasses.asdict(rank) for rank in result.ranks],
        "verification": None
        if verification is None
        else {
            **dataclasses.asdict(verification),
            "forms_agree": verification.forms_agree,
            "ranks_agree": verification.ranks_agree,
        },
    }


@app.command()
def tune(
    model: _MODEL = "kimi-k3",
    ep: _EP = 8,
    batch: Annotated[
        str, typer.Option(help="Batch sizes that will be served: numbers and ranges, separated by commas.")
    ] = "1-64",
    coverage: Annotated[
        bool, typer.Option("--coverage", help="Run nothing: show each key, and where its configuration comes from.")
    ] = False,
    routing: Annotated[
        Path | None,
        typer.Option(help="Recorded routing, a torch file of [N, K] global expert ids; all alike by default."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Search for keys that are known, too.")] = False,
    device_name: Annotated[
        str | None, typer.Option(help="With --coverage: another device than this machine's, as 'NVIDIA H200'.")
    ] = None,
    as_json: _JSON = False,
) -> None:
    """Search for the fastest configuration of the native expert GEMMs for one rank of a model, and keep it.

    A key holds the work and nothing of how ids are written, so calls with global and rank-local ids share it. Nothing
    is searched for while serving. Here rank 0 is searched for; under torchrun with `--ep` processes every rank measures
    its own and all keep the choice that is best for the slowest. Example: `rankmoe tune --model kimi-k3 --ep 8`
    """
    import torch

    from rankmoe import tuned
    from rankmoe.distributed import launch
    from rankmoe.env import is_under_torchrun, local_rank
    from rankmoe.kernels import experts_common, experts_cuda
    from rankmoe.models.presets import get_preset
    from rankmoe.tuning import batches_of, config_text, plan_batches, plan_keys
    from rankmoe.tuning import coverage as find_coverage
    from rankmoe.types import ExpertPlacement

    preset, batches = get_preset(model), plan_batches(_ranges("batch", batch))
    placement = ExpertPlacement(preset.num_experts, ep, 0)
    architecture = "sm_90"
    if experts_cuda.available():
        torch.cuda.set_device(local_rank() % torch.cuda.device_count())
        device = torch.device("cuda", torch.cuda.current_device())
        architecture = experts_common.architecture(device)
        device_name = device_name or experts_common.device_name(device)
    elif device_name is None or not coverage:
        raise ValueError(
            "tune: expected a GPU that the native kernels run on, found none; --coverage needs --device-name"
        )
    keys = plan_keys(preset, placement, batches, architecture)
    fingerprint = experts_common.fingerprint()
    path = tuned.user_file(fingerprint, device_name)
    if not coverage:
        report = launch(_tune_rank, ep if is_under_torchrun() else 1, preset, ep, batches, routing, path, force)
        if report is None:  # under torchrun, rank 0 speaks for all
            return
    rows = [
        {
            "batches": batches_of(key, preset, placement, batches),
            "gemm": key.stage,
            "expected_rows": key.expected_rows,
            "source": source,
            "config": config_text(config),
            "key": str(key),
        }
        for key, config, source in find_coverage(keys, fingerprint, device_name)
    ]
    if as_json:
        _print_json({"device": device_name, "file": str(path), "keys": rows})
        return
    console = Console()
    console.print(f"{model}, EP {ep}, rank 0, on {device_name}; both forms of ids look up these keys", highlight=False)
    table = Table("batches", "GEMM", "expected rows", "comes from", "configuration")
    for row in rows:
        table.add_row(*(str(row[name]) for name in ("batches", "gemm", "expected_rows", "source", "config")))
    console.print(table)
    if not coverage:
        failures = sum(result.num_failures for result in report.tuned)
        console.print(
            f"{len(report.tuned)} keys searched, {report.num_known} known before, {failures} candidates could not be "
            f"launched; kept in {path}",
            highlight=False,
            soft_wrap=True,
        )


def _tune_rank(
    group: ExpertParallelGroup,
    preset: ModelPreset,
    ep: int,
    batches: list[int],
    routing: Path | None,
    path: Path,
    force: bool,
) -> Report:
    """What one rank does of `tune`; alone, it is rank 0 of ``ep``."""
    import torch

    from rankmoe.bench.profile import GpuProfiler, popularity_of
    from rankmoe.kernels import experts_common
    from rankmoe.tuning import plan_keys
    from rankmoe.tuning import tune as search
    from rankmoe.types import ExpertPlacement

    placement = ExpertPlacement(preset.num_experts, ep, group.ep_rank)
    architecture = experts_common.architecture(torch.device("cuda", torch.cuda.current_device()))
    popularity = None if routing is None else popularity_of(torch.load(routing, weights_only=True), placement)
    keys = plan_keys(preset, placement, batches, architecture)
    with Progress(console=Console(stderr=True), transient=True, disable=group.ep_rank > 0) as progress:
        task = progress.add_task("making random experts", total=len(keys))
        profiler = GpuProfiler(preset, placement, popularity)
        return search(
            keys,
            profiler,
            path,
            experts_common.fingerprint(),
            group=group,
            force=force,
            progress=lambda done, total, key: progress.update(task, completed=done, total=total, description=str(key)),
        )


@app.command()
def report(
    records: Annotated[Path, typer.Option(help="Folder of JSON records.")] = Path("benchmarks/results"),
    out: Annotated[Path, typer.Option(help="Where to write the page.")] = Path("report.html"),
) -> None:
    """Write one self-contained HTML page of a folder's benchmark records, with figures and tables.

    Layer times against the floor, the front beside its peer, decode throughput, expert load by rank, and where a
    serving plan's configurations come from. Nothing is run. Light and dark. Example: `rankmoe report --out report.html`
    """
    from rankmoe.report.page import write_report

    try:
        count = write_report(records, out)
    except OSError as error:
        raise ValueError(f"{error}") from error
    print(f"{out}: {count} records")


@bench.command("layer")
def bench_layer(
    model: _MODEL = "kimi-k3",
    ep: _EP = 8,
    tokens: Annotated[
        str | None, typer.Option(help="Token counts, separated by commas; 1 to 64 on a GPU and 8 on a CPU by default.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default cuda where there is one.")] = None,
    routing: Annotated[
        str, typer.Option(help="On a GPU: uniform, or skewed, where few experts get most tokens.")
    ] = "uniform",
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each stage; the median is reported.")] = 5,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON record; nowhere by default.")] = None,
    as_json: _JSON = False,
) -> None:
    """Time one rank's routed layer on random MXFP4 weights of the model's real size.

    On a GPU: every engine that covers the shape, beside reading the touched weights once (floor) and beside library
    parts put together (composition, with humming-kernels installed). Needs memory for the weights (Kimi-K3 on EP8:
    1.97 GB), on a GPU once more for each engine. Example: `rankmoe bench layer --device cpu --tokens 8`
    """
    import torch

    from rankmoe.bench.layer import LayerOptions, run
    from rankmoe.bench.layer_cuda import ROUTINGS
    from rankmoe.models.presets import get_preset

    if routing not in ROUTINGS:
        raise ValueError(f"routing: expected one of {', '.join(ROUTINGS)}, got {routing!r}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {device!r}")
    if device == "cuda":
        _bench_layer_cuda(model, ep, tokens, routing, repeats, output, as_json)
        return
    options = LayerOptions(get_preset(model), ep, _numbers("tokens", tokens or "8"), repeats)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("making random experts", total=None)
        record = run(options, lambda done, total: progress.update(task, completed=done, total=total))
    if _hand_out(record, output, as_json):
        return
    console = Console()
    console.print(f"{model}, EP {ep}, rank 0, on {record.device}", highlight=False)
    table = Table("tokens", "active experts", "variant", "stage", "ms", "spread, ms", "GB/s", "x floor")
    floors = {row["tokens"]: row["us"] for row in record.rows if row["variant"] == "floor"}
    for row in record.rows:
        table.add_row(
            str(row["tokens"]),
            str(row["active_experts"]),
            row["variant"],
            row["stage"],
            f"{row['us'] / 1e3:.1f}",
            f"{row['spread'] / 1e3:.1f}",
            f"{row['bytes'] / row['us'] / 1e3:.1f}",
            f"{row['us'] / floors[row['tokens']]:.2f}" if row["stage"] in ("gemms", "layer") else "",
        )
    console.print(table)
    notes = record.notes
    console.print(
        f"weights {notes['weight_bytes'] / 1e9:.2f} GB; peak memory beyond them "
        f"{notes['peak_memory_beyond_weights_bytes'] / 1e6:.0f} MB in all (interpreter and torch included), "
        f"{notes['peak_memory_of_the_layer_bytes'] / 1e6:.0f} MB of it for the layer",
        highlight=False,
    )


def _bench_layer_cuda(
    model: str, ep: int, tokens: str | None, routing: str, repeats: int, output: Path | None, as_json: bool
) -> None:
    from rankmoe.bench.layer_cuda import BenchmarkError, LayerCudaOptions, run, table_rows
    from rankmoe.models.presets import get_preset

    counts = _numbers("tokens", tokens or "1,2,4,8,16,32,64")
    errors = Console(stderr=True)
    try:
        options = LayerCudaOptions(get_preset(model), ep, counts, routing, repeats)
        record = run(options, lambda text: errors.print(text, highlight=False))
    except BenchmarkError as error:
        raise ValueError(str(error)) from error
    if _hand_out(record, output, as_json):
        return
    console = Console()
    console.print(f"{model}, EP {ep}, rank 0, {routing} routing, on {record.device}: medians", highlight=False)
    _print_table(console, table_rows(record))


@bench.command("front")
def bench_front(
    model: _MODEL = "kimi-k3",
    ep: _EP = 8,
    tokens: Annotated[str, typer.Option(help="Token counts, separated by commas.")] = "1,2,4,8,16,24,32,64",
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each variant; the median is reported.")] = 25,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON record; nowhere by default.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Where to write the table as Markdown.")] = None,
    as_json: _JSON = False,
) -> None:
    """Time the launch from router logits to schedule, beside its parts and SGLang's launch. Needs a Hopper GPU.

    Checks every variant first, then times graph replays. Example: `rankmoe bench front --tokens 8,16,24`
    """
    from rankmoe.bench.front import FrontOptions, run, table_rows
    from rankmoe.bench.record import markdown as as_markdown
    from rankmoe.models.presets import get_preset

    try:
        record = run(FrontOptions(get_preset(model), ep, _numbers("tokens", tokens), rounds))
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    if markdown is not None:
        markdown.write_text(as_markdown(table_rows(record)) + "\n")
    if _hand_out(record, output, as_json):
        return
    console = Console()
    console.print(f"{model}, EP {ep}, on {record.device}: microseconds of one launch, medians", highlight=False)
    _print_table(console, table_rows(record))


@bench.command("decode")
def bench_decode(
    model: Annotated[str, typer.Option(help="kimi-k3, on a GPU, or nano, anywhere.")] = "kimi-k3",
    ep: _EP = 8,
    batch: Annotated[str, typer.Option(help="Numbers of sequences, separated by commas.")] = "8,16,32",
    input_length: Annotated[int, typer.Option("--input", min=1, help="Tokens of each prompt.")] = 8192,
    output_length: Annotated[int, typer.Option("--output", min=1, help="Tokens that each sequence gets.")] = 512,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Layers with memory of their own; by default as many as fit.")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh/--no-fresh", help="Also search for GEMM configurations anew in each arm.")
    ] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Measurements of each arm; the median is reported.")] = 15,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; by default cuda where there is one.")] = None,
    record_file: Annotated[
        Path | None, typer.Option("--record", help="Where to write the JSON record; nowhere by default.")
    ] = None,
    as_json: _JSON = False,
) -> None:
    """Decode throughput of one rank with the routed layers run in three ways, in turn.

    (a) routing, packing, quantising and a schedule over global ids, a launch each; (b) one launch for the first three,
    and a schedule over rank-local ids; (c) one launch for all. The same GEMMs and the same outputs, bit for bit; what
    surrounds the routed layers is in docs/benchmarks.md. Example: `rankmoe bench decode --batch 8,16,32`
    """
    import torch

    from rankmoe.bench.decode import DecodeError, DecodeOptions, run, table_rows
    from rankmoe.bench.decode_model import SIZES

    if model not in SIZES:
        raise ValueError(f"model: expected one of {', '.join(SIZES)}, got {model!r}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ValueError(f"device: expected cpu, or cuda where there is one, got {device!r}")
    if device == "cpu" and model != "nano":
        raise ValueError(f"model: expected nano on a CPU, got {model!r}")
    options = DecodeOptions(
        SIZES[model], ep, _numbers("batch", batch), input_length, output_length, layers, rounds, fresh, device
    )
    errors = Console(stderr=True)
    try:
        record = run(options, lambda text: errors.print(text, highlight=False))
    except DecodeError as error:
        raise ValueError(str(error)) from error
    if _hand_out(record, record_file, as_json):
        return
    console = Console()
    notes = record.notes
    console.print(
        f"{model}, EP {ep}, rank 0, on {record.device}: {notes['num_layers']} layers a step, "
        f"{notes['distinct_layers']} of them distinct; {input_length} tokens in, {output_length} out; outputs of the "
        "arms equal bit for bit; active: experts of a layer",
        highlight=False,
    )
    _print_table(console, table_rows(record))
    for size, details in notes["batches"].items():
        if details["profile_runs"]:
            runs = ", ".join(f"{arm} {count}" for arm, count in details["profile_runs"].items())
            same = "the same" if details["identical_picks"] else "different"
            console.print(
                f"batch {size}: the arms picked {same} configurations; candidates timed by the fresh search: {runs}",
                highlight=False,
            )


@bench.command("routing")
def bench_routing(
    model: _MODEL = "kimi-k3",
    ep: _EP = 8,
    text: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Text for nano to read; skewed random logits by default."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of skewed random logits.")] = 4096,
    output: Annotated[Path | None, typer.Option(help="Where to write the JSON record; nowhere by default.")] = None,
    as_json: _JSON = False,
) -> None:
    """Count the slots that each expert gets: of real text through nano, or of skewed random logits.

    Runs on the CPU in seconds; `rankmoe report` draws the record. Example: `rankmoe bench routing --model kimi-k3`
    """
    from rankmoe.bench.routing import run

    record = run(model, ep, text, tokens)
    if _hand_out(record, output, as_json):
        return
    console = Console()
    console.print(f"{model}, {record.notes['source']}: slots of an expert", highlight=False)
    rows = [["layer", "mean", "smallest", "largest", "experts without a token"]]
    for row in record.rows:
        counts = row["counts"]
        cells = (row["layer"], f"{sum(counts) / len(counts):.1f}", min(counts), max(counts), counts.count(0))
        rows.append([str(cell) for cell in cells])
    _print_table(console, rows)


def _hand_out(record: Record, output: Path | None, as_json: bool) -> bool:
    """Write the record where asked, and print it as JSON where asked. Returns whether that was the answer."""
    if output is not None:
        record.write(output)
    if as_json:
        print(record.to_json(), end="")
    return as_json


def _print_table(console: Console, rows: list[list[str]]) -> None:
    header, *body = rows
    table = Table(*header)
    for cells in body:
        table.add_row(*cells)
    console.print(table)


def _numbers(name: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{name}: expected whole numbers above 0, separated by commas, got {text!r}")
    return numbers


def _ranges(name: str, text: str) -> list[int]:
    """Whole numbers, ascending and each once, of `1-8,16`."""
    numbers: set[int] = set()
    try:
        for part in text.split(","):
            first, dash, last = part.partition("-")
            numbers |= set(range(int(first), int(last if dash else first) + 1))
    except ValueError:
        numbers = set()
    if not numbers or min(numbers) < 1:
        raise ValueError(f"{name}: expected whole numbers above 0 and ranges, separated by commas, got {text!r}")
    return sorted(numbers)


def _format_range(offset: int, count: int) -> str:
    return f"{offset}..{offset + count - 1}"


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))
