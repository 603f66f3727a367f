"""The discrete-event model of scaling: calibrate, compare with measurements, predict.

    torchrun --standalone --nproc_per_node=2 -m scaling_runs.model --calibrate \\
        --config configs/weak_scaling/cpu.yaml      links and kernel times of this machine
    torchrun --standalone --nproc_per_node=8 -m scaling_runs.model --paced
                                                    real ranks and messages around local parts that
                                                    pause for a known time, more ranks than cores
    python -m scaling_runs.model --validate --host cpu
                                                    against rows of weak_scaling.py and of
                                                    namespaces.py
    python -m scaling_runs.model --local-heap --host nvidia_h200
                                                    the chooser's predictions for virtual ranks of
                                                    a GPU against rows of local_exchange.py and of
                                                    virtual_ranks.py
    python -m scaling_runs.model --predict h20_ib --ranks 4,8,16,32,64,128,1024

On a GPU, --calibrate on one rank measures kernel times (kernels_nvidia_h200.csv), which --predict
reads; without them it takes rows of single_gpu.py and virtual_ranks.py. It refuses until --validate
has passed with the model's present sources. Every row it writes (predicted_<cluster>.csv) has kind
= modelled; where kernel times of the cluster are not known, rows of its slowest are `.._slow`.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

import torch
import torch.distributed as dist

from flexla_dist.train.arguments import ArgumentProblem
from flexla_dist.train.config import TrainConfig
from flexla_dist.train.launch import start
from scaling_runs.baselines import SYSTEMS
from scaling_runs.machine import RESULTS, current_commit
from scaling_runs.model.calibrate import calibrate, measure_links, read_kernels, read_links
from scaling_runs.model.clusters import (
    PRESETS,
    Cluster,
    ModelProblem,
    from_calibration,
    get_cluster,
    slowest,
)
from scaling_runs.model.emulated import EmulatedRows
from scaling_runs.model.gpu_rows import ASSUMPTIONS as GPU_ASSUMPTIONS
from scaling_runs.model.gpu_rows import GpuRows
from scaling_runs.model.paced import (
    PACED_COLUMNS,
    PACED_KEY,
    paced_model,
    paced_systems,
)
from scaling_runs.model.predict import simulate
from scaling_runs.model.programs import PROGRAMS
from scaling_runs.model.validate import (
    TOLERANCE,
    Measurements,
    compare,
    judge,
    keep_verdict,
    require_validation,
)
from scaling_runs.model.workload import KernelTable, Workload, nearest_world, workload_of
from scaling_runs.rows import RowStore, format_table
from scaling_runs.weak_grid import Grid, GridProblem, Point, add_options, read_grid
from scaling_runs.weak_rows import COLUMNS, KEY, describe_run, measured_times

PREDICTED = (
    *("kind", "date", "commit", "cluster", "kernels_of", "system", "variant", "direction"),
    *(
        "P",
        "T",
        "B",
        "H",
        "K",
        "V",
        "dtype",
        "state_bytes",
        "ms",
        "over_same_plan_ms",
        "exchange_ms",
    ),
)
MOST_ALONE = 128  # ranks: exchanges of more take long to simulate
PREDICTED_KEY = (
    *("cluster", "system", "variant", "direction", "P", "T", "B", "H", "K", "V", "dtype"),
)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m scaling_runs.model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--calibrate", action="store_true", help="measure links and kernels here")
    what.add_argument("--paced", action="store_true", help="compare with paced ranks, here")
    what.add_argument("--validate", action="store_true", help="compare with measured rows")
    what.add_argument("--local-heap", action="store_true", help="compare rows of virtual ranks")
    what.add_argument("--predict", metavar="CLUSTER", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--host", default="cpu", help="slug of the machine whose rows are compared")
    parser.add_argument("--config", type=Path, help="YAML file of a grid")
    add_options(parser)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the CSV files")
    parser.add_argument("--commit", help="commit to note where there is no git history")
    return parser.parse_args(words)


def run_calibration(grid: Grid, options: argparse.Namespace) -> None:
    """Measure on all ranks of the world that was started."""
    ranks = start(TrainConfig(threads=grid.threads))
    provenance = describe_run("auto", (0,) * ranks.world, "", options.commit)

    def say(text: str) -> None:
        print(text, flush=True)

    calibrate(grid, provenance, ranks.device, options.results, say)
    dist.barrier()
    dist.destroy_process_group()


def run_paced(grid: Grid, options: argparse.Namespace) -> int:
    """Compare the programs of the model with real ranks; rows go to paced_<host>.csv."""
    ranks = start(TrainConfig(threads=1, device="cpu"))
    provenance = describe_run("auto", (0,) * ranks.world, "", options.commit)
    folder, slug = options.results, provenance.machine.slug
    measure_links(provenance, ranks.device, 0.2, folder, lambda text: None)
    systems = [name for name in PROGRAMS if name in SYSTEMS and name != "hierarchical"]
    found, status = paced_systems(systems, grid.seconds), 0
    if ranks.rank == 0:
        rows = nearest_world(read_links(folder, slug), ranks.world)
        links = dict(from_calibration(slug, 1, rows).inside)
        store = RowStore(folder / f"paced_{slug}.csv", PACED_COLUMNS, PACED_KEY)
        for system, times in found.items():
            modelled = 1e3 * paced_model(system, ranks.world, links)
            error = modelled / times.median_ms - 1
            status |= abs(error) > TOLERANCE
            shared = provenance.columns(ranks.world)
            row = {name: shared[name] for name in PACED_COLUMNS if name in shared}
            row |= {n: v for n, v in measured_times(times).items() if n in PACED_COLUMNS}
            row |= {"kind": "paced", "system": system, "P": ranks.world}
            store.put({**row, "modelled_ms": f"{modelled:.2f}", "error": f"{error:+.3f}"})
        print(format_table(store.rows(), ("system", "P", "median_ms", "modelled_ms", "error")))
    dist.barrier()
    dist.destroy_process_group()
    return status


def run_validation(options: argparse.Namespace) -> int:
    """Compare with the measured rows of a machine and keep the verdict."""
    folder, host = options.results, options.host
    path = folder / f"weak_scaling_{host}.csv"
    if not path.is_file():
        raise ModelProblem(f"no measured rows {path}: run weak_scaling.py first")
    rows = [row for row in RowStore(path, COLUMNS, KEY).rows() if row["status"] == "ok"]
    cores = int(rows[0]["cores"]) if rows else 0
    measured = Measurements(host, cores, rows, read_kernels(folder, host), read_links(folder, host))
    verdict = judge(compare(measured), cores)
    emulated = EmulatedRows.of(folder, host).verdict()
    table = [
        {
            "point": c.point.words(),
            "measured_ms": f"{c.measured_ms:.2f}",
            "modelled_ms": f"{c.modelled_ms:.2f}",
            "error": f"{c.error:+.0%}",
        }
        for c in verdict.exact
    ]
    print(format_table(table, ("point", "measured_ms", "modelled_ms", "error")))
    for line in (*verdict.wrong_pairs, *(emulated.wrong_pairs if emulated else ())):
        print("order differs:", line)
    hosts = "not measured (launch/emulated_hosts.sh)" if emulated is None else emulated.summary()
    print(f"\nprocesses of a host: {verdict.summary()}\nemulated hosts: {hosts}")
    print(keep_verdict(verdict, folder, host, emulated))
    return 0 if verdict.passed and emulated is not None and emulated.passed else 1


def run_local_heap(options: argparse.Namespace) -> int:
    """Print the chooser's predictions beside the rows of virtual ranks of one device."""
    from scaling_runs.model.local_heap import report

    text, good = report(options.results, options.host)
    print(text)
    return 0 if good else 1


def predicted_rows(
    grid: Grid, cluster: Cluster, table: KernelTable | GpuRows
) -> list[dict[str, object]]:
    """Modelled rows of all points of weak scaling of a grid, and of every system with a program."""
    found: list[dict[str, object]] = []
    whole = replace(grid, modes=("weak",), placements=("barrier",), systems=("ideal_same_plan",))
    for point in whole.points():
        kernels_of = cluster.kernels_of
        if isinstance(table, GpuRows):
            kernels_of = f"{kernels_of} ({table.source(point.variant)})"
        load = workload_of(point, table.kernels(point).scaled(cluster.kernel_scale))
        floor = simulate("ideal_same_plan", load, cluster, point.direction).seconds
        for system in PROGRAMS:
            if system == "ulysses" and point.heads % point.P:
                continue  # it cuts by heads
            try:
                seconds = simulate(system, load, cluster, point.direction).seconds
                alone = _alone(system, load, cluster, point)
            except ModelProblem:
                continue
            times = (seconds, floor, alone)
            found.append(_row(replace(point, system=system), cluster, times, kernels_of))
    return found


def _alone(system: str, load: Workload, cluster: Cluster, point: Point) -> float | None:
    """Seconds of the exchange without local work, where the report shows it."""
    if point.direction != "fwd" or point.P > MOST_ALONE:
        return None
    return simulate(system, load.exchange_alone(), cluster, "fwd").seconds


def _row(
    point: Point, cluster: Cluster, times: tuple[float, float, float | None], kernels_of: str
) -> dict[str, object]:
    seconds, floor, alone = times
    row = {name: value for name, value in vars(point).items() if name in PREDICTED}
    return row | {
        "kind": "modelled",
        "date": datetime.date.today().isoformat(),
        "commit": current_commit(),
        "cluster": cluster.name,
        "kernels_of": kernels_of,
        "state_bytes": point.state_bytes,
        "ms": f"{1e3 * seconds:.4f}",
        "over_same_plan_ms": f"{1e3 * (seconds - floor):.4f}",
        "exchange_ms": "" if alone is None else f"{1e3 * alone:.4f}",
    }


def run_prediction(grid: Grid, options: argparse.Namespace) -> None:
    """Write modelled rows of a preset; refused without a passing comparison and kernel times."""
    cluster = get_cluster(options.predict)
    checked = require_validation(options.results)
    rows = read_kernels(options.results, cluster.kernels_of)
    table = KernelTable(rows) if rows else GpuRows.read(options.results, cluster.kernels_of)
    path = options.results / f"predicted_{cluster.name}.csv"
    store = RowStore(path, PREDICTED, PREDICTED_KEY)
    written = []
    for one in (cluster, slowest(cluster)):
        if one is not None:
            written += [store.put(row) for row in predicted_rows(grid, one, table)]
    print(format_table(written, PREDICTED))
    print(f"\nmodelled, not measured. Comparison with measurements: {checked}")
    from scaling_runs.report_data import read_report
    from scaling_runs.report_runs import system_runs, unrun_words

    runs = system_runs(options.results, read_report(options.results).lines)
    words = unrun_words((row["system"] for row in written), runs)
    print(f"- {words}" if words else "- every system has a measured run behind it")
    measured = GPU_ASSUMPTIONS if isinstance(table, GpuRows) else ()
    for line in (*cluster.assumptions, *measured, *cluster.sources):
        print("-", line)
    print(path)


def main(words: Sequence[str] | None = None) -> int:
    """Do what the options ask for."""
    options = parse(words)
    try:
        changes = {item.name: getattr(options, item.name) for item in fields(Grid)}
        grid = read_grid(options.config, changes)
        if options.calibrate:
            run_calibration(grid, options)
            return 0
        if options.paced:
            return run_paced(grid, options)
        if options.validate:
            return run_validation(options)
        if options.local_heap:
            return run_local_heap(options)
        run_prediction(grid, options)
    except (ModelProblem, GridProblem, ArgumentProblem) as problem:
        print(f"scaling_runs.model: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
