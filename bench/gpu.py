"""One GPU: MNIST to 99 %, CIFAR-10-shaped throughput, and how much of the card's own matmul rate that is.

python bench/gpu.py [--quick] [--write[=FILE]]

Every run is src/train.py's own work(), alone in a fresh process, with backend=auto: nccl and one rank where there is a GPU,
gloo where there is none. MNIST is read from LOCKSTEP_DATA; without it the digits inside scikit-learn stand in. The
CIFAR-10-shaped images are noise, made in memory. --quick: a few samples, to see that it all runs. --write: keep the tables,
under the device's name, in bench/RESULTS.md or FILE.
"""

import argparse
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "bench")]
RESULTS = ROOT / "bench" / "RESULTS.md"

COMPILE = ("false", "true", "reduce-overhead")  # trainer.compile; the last one captures CUDA graphs
QUIET = ["trainer.log_every=1000000", "trainer.keep=1"]  # a step that logs waits for the device: that is what logging is
WARM = 5  # steps before the watch for host syncs
AT_LEAST = 0.3  # seconds that a matmul rate is measured for


def synthetic(samples, train):
    """`samples` CIFAR-10-shaped images of noise, and classes."""
    import torch

    from lockstep.datasets import InMemory

    generator = torch.Generator().manual_seed(int(train))
    images = torch.randint(0, 256, (samples, 3, 32, 32), dtype=torch.uint8, generator=generator)
    return InMemory(images, torch.randint(0, 10, (samples,), generator=generator))


class Watch:
    """What conf calls `loop`: the synchronous one, watched for when it began and, between two steps, for waits on the device."""

    began, steps, places = None, 0, Counter()

    @classmethod
    def train(cls, run, loader, after_step):
        from lockstep import loop

        cls.began = cls.began or time.time()
        return loop.train(run, loader, after_step)

    @classmethod
    def syncs(cls, run, loader, after_step):
        """Counts, of all steps after the WARM first, the places where the host waits for a GPU."""
        import torch

        from lockstep import loop

        def after(samples):
            cls.steps = run.progress.step - WARM
            if cls.steps == 0 and torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("warn")

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                return loop.train(run, loader, [*after_step, after])
            finally:
                if torch.cuda.is_available():
                    torch.cuda.set_sync_debug_mode("default")
                found = [word for word in caught if "called a synchronizing" in str(word.message)]
                cls.places.update(f"{Path(word.filename).name}:{word.lineno}" for word in found)


def composed(folder, *overrides):
    import test_configs
    from lockstep import entry

    return entry.resolved(test_configs.composed(f"run_dir={folder}", *QUIET, *overrides))


def life(cfg, told):
    """One run in this process; tells what the loop's watch saw, and the device's memory at its fullest."""
    import gpu  # this file as the config knows it
    import torch

    import train

    sys.stdout = sys.stderr  # the console's lines beside the tables
    train.work(cfg)
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    told.send({"began": gpu.Watch.began, "steps": gpu.Watch.steps, "places": gpu.Watch.places, "GiB": peak})
    os._exit(0)


def matmul_rates(sizes, told):
    """Tells the device's name, torch's version and {type: the best rate in FLOP/s of square matrices' products}."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    rates = {}
    for name, dtype in (("fp32", torch.float32), ("tf32", torch.float32), ("bf16", torch.bfloat16)):
        if name == "tf32" and device.type == "cpu":
            continue
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        for size in sizes:
            one, other = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
            product, best = one @ other, float("inf")
            wait()
            until = time.perf_counter() + AT_LEAST
            while time.perf_counter() < until:
                began = time.perf_counter()
                for _ in range(10):
                    torch.mm(one, other, out=product)
                wait()
                best = min(best, (time.perf_counter() - began) / 10)
            rates[name] = max(rates.get(name, 0), 2 * size**3 / best)
    told.send((torch.cuda.get_device_name() if device.type == "cuda" else cpu(), torch.__version__, rates))
    os._exit(0)


def cpu():
    with open("/proc/cpuinfo") as file:
        names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(os.sched_getaffinity(0))} cores"


def flops(model, told):
    """Tells the floating-point operations of a training step on one sample of a net, as torch counts them; computes none."""
    import torch
    from hydra.utils import instantiate
    from torch.utils.flop_counter import FlopCounterMode

    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        net = instantiate(model, _convert_="all")
        net(torch.empty(8, *model.shape)).sum().backward()
    told.send(counter.get_total_flops() / 8)
    os._exit(0)


def alone(function, *arguments, method="forkserver"):
    """What function(*arguments, told) tells from a process of its own; None where it fails, having said why."""
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(["torch", "torch.distributed", "hydra"])
    heard, told = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(*arguments, told))
    process.start()
    told.close()
    try:
        return heard.recv()
    except EOFError:
        return None
    finally:
        process.join()


def scalars(folder):
    """{tag: [(seconds since 1970, value), ...]} of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.wall_time, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def table(*head):
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]


def to_accuracy(out, quick, compiles, rates):
    """A table: MNIST to 99 % accuracy, from the command and from the first step."""
    if "LOCKSTEP_DATA" in os.environ and not quick:
        data, goal, recipe = "mnist", 0.99, ["trainer.batch_size=256", "optimizer.lr=0.1", "trainer.epochs=2"]
    else:
        data, goal, recipe = "digits", 0.95, ["trainer.epochs=3"]
    head = f"{data}, convnet, bf16, trainer.compile="
    lines = table(head, "samples/s", "test accuracy", f"{goal:.0%} from the command", f"{goal:.0%} from the first step")
    for compile in compiles:
        folder = out / f"{data}-{compile}"
        how = [f"dataset={data}", "model=convnet", "optimizer.nesterov=true", "trainer.precision=bf16", f"trainer.compile={compile}", *recipe]
        cfg, began = composed(folder, *how, "loop._target_=gpu.Watch.train"), time.time()
        saw = alone(life, cfg, method="spawn")
        if saw is None:
            lines.append(f"| {compile} | failed | | | |")
            continue
        curves = scalars(folder)
        reached = [moment for moment, accuracy in curves["test/accuracy"] if accuracy >= goal]
        speed = max(value for _, value in curves["speed/samples_per_s"])
        times = [f"{reached[0] - moment:.2f} s" if reached else "-" for moment in (began, saw["began"])]
        lines.append(f"| {compile} | {speed:,.0f} | {curves['test/accuracy'][-1][1]:.4f} | {' | '.join(times)} |")
    return lines


def throughput(out, quick, compiles, rates):
    """A table: CIFAR-10-shaped samples/s of a ResNet-18 and what share of the matmul rate that is, by batch size and precision."""
    samples, batches = (32, (16,)) if quick else (50_000, (128, 512, 2048))
    noise = ["dataset=cifar10", "dataset.prepare=null", "~dataset.train.data_dir", "~dataset.test.data_dir"]
    noise += [f"dataset.{part}._target_=gpu.synthetic" for part in ("train", "test")]
    noise += [f"+dataset.train.samples={samples}", f"+dataset.test.samples={min(samples, 2048)}", "model=resnet18"]
    each = alone(flops, composed(out, *noise).model)
    rows = [(precision, batch, "false") for precision in ("fp32", "bf16") for batch in batches]
    rows += [("bf16", batches[-1], compile) for compile in compiles[1:]]
    net = f"ResNet-18 on 3x32x32, {each / 1e9:.2f} GFLOP a sample"
    lines = table(net, "batch", "trainer.compile=", "samples/s", "TFLOP/s", "of its matmul rate", "peak memory")
    for precision, batch, compile in rows:
        folder = out / f"cifar-{precision}-{batch}-{compile}"
        how = [f"trainer.precision={precision}", f"trainer.batch_size={batch}", f"trainer.compile={compile}"]
        run = ["trainer.epochs=3", "trainer.eval_every=3", "trainer.save_every=3epochs", "loop._target_=gpu.Watch.train"]
        saw = alone(life, composed(folder, *noise, *how, *run))
        if saw is None:
            lines.append(f"| {precision} | {batch} | {compile} | failed | | | |")
            continue
        speed = max(value for _, value in scalars(folder)["speed/samples_per_s"][1:])
        kind = "tf32" if precision == "fp32" and "tf32" in rates else precision  # what cuDNN convolves float32 in
        share, memory = speed * each / rates[kind], f"{saw['GiB']:.1f} GiB" if saw["GiB"] else ""
        lines.append(f"| {precision} | {batch} | {compile} | {speed:,.0f} | {speed * each / 1e12:.4g} | {share:.0%} of {kind} | {memory} |")
    return lines


def waits(out, quick, compiles, rates):
    """A table: where the host waits for the device in a training step. There should be no such place."""
    lines = table("trainer.compile=", "steps watched", "host syncs in them", "where")
    for compile in compiles:
        how = ["dataset=digits", "trainer.precision=bf16", "trainer.epochs=1", f"trainer.compile={compile}", "loop._target_=gpu.Watch.syncs"]
        saw = alone(life, composed(out / f"waits-{compile}", *how))
        if saw is None:
            lines.append(f"| {compile} | failed | | |")
            continue
        places = ", ".join(f"{place} ({times})" for place, times in sorted(saw["places"].items()))
        lines.append(f"| {compile} | {saw['steps']} | {sum(saw['places'].values())} | {places or 'nowhere'} |")
    return lines


def kept(section, text):
    """`text`, a file of "## " sections, with `section` in the place of the one of its heading, or at the end."""
    sections = text.split("\n## ")
    heading = section.partition("\n")[0].removeprefix("## ")
    same = [number for number, old in enumerate(sections) if old.partition("\n")[0] == heading]
    if same:
        sections[same[0]] = section.removeprefix("## ").rstrip("\n") + "\n"
    else:
        sections.append(section.removeprefix("## "))
    return "\n## ".join(part.rstrip("\n") + "\n" for part in sections)


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--quick", action="store_true", help="a few samples, to see that it runs")
    options.add_argument("--write", nargs="?", type=Path, const=RESULTS, help="keep the tables in bench/RESULTS.md, or in another file")
    asked = options.parse_args()
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"  # ranks leave without teardown, and Python would call tqdm's lock leaked
    began = time.time()
    name, version, rates = alone(matmul_rates, (256,) if asked.quick else (2048, 4096, 8192, 16384))
    compiles = COMPILE[:1] if asked.quick else COMPILE
    speeds = ", ".join(f"{kind} {rate / 1e12:.4g}" for kind, rate in rates.items())
    lines = [f"## One device: {name}", "", f"`python bench/gpu.py{' --quick' * asked.quick}`, torch {version}, {time.strftime('%Y-%m-%d')}."]
    lines += [f"Matmul rate, measured, in TFLOP/s: {speeds}.", ""]
    print("\n".join(lines), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        for measure in (to_accuracy, throughput, waits):
            rows = [*measure(out, asked.quick, compiles, rates), ""]
            print("\n".join(rows), flush=True)  # what is known stays known, whatever ends the next
            lines += rows
    if asked.write:
        asked.write.write_text(kept("\n".join(lines), asked.write.read_text() if asked.write.exists() else "# Results\n"))
        print(f"kept in {asked.write}")
    print(f"took {time.time() - began:.0f} s", file=sys.stderr)
    if any("| failed" in line for line in lines):
        sys.exit("a run failed, see above")


if __name__ == "__main__":
    main()
