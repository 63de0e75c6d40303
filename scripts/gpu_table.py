"""Makes the table of a part of gpu_check.py from check.json: plain ASCII of at most MAX_CHARACTERS."""
import math
from dataclasses import dataclass, field

MAX_CHARACTERS = 8000
COLUMNS = 140


@dataclass
class Section:
    """Rows below a head. If the table is too long, rows are dropped first from the sections with the highest `rank`; in
    a section, the least important rows first, from the end."""
    head: list
    rank: int
    rows: list = field(default_factory=list)  # (importance, line)
    left_out: int = 0

    def drop(self):
        least = min(importance for importance, _ in self.rows)
        index = max(i for i, (importance, _) in enumerate(self.rows) if importance == least)
        del self.rows[index]
        self.left_out += 1

    def lines(self):
        note = [f"  ({self.left_out} more rows left out)"] if self.left_out else []
        return [*self.head, *(line for _, line in self.rows), *note]


def text_of(sections):
    lines = [line for section in sections for line in section.lines()]
    clean = ("".join(c if " " <= c <= "~" else "?" for c in line) for line in lines)
    return "\n".join(line[:COLUMNS].rstrip() for line in clean) + "\n"


def fit(sections, limit):
    """The text of the sections, with rows dropped until it fits the limit."""
    while len(text_of(sections)) > limit:
        droppable = [section for section in sections if section.rows]
        if not droppable:
            break
        max(droppable, key=lambda section: (section.rank, len(section.rows))).drop()
    return text_of(sections)[:limit]


def show(value, pattern="{:.1f}", factor=1):
    """A number for a column, or "-" if it is missing."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return "-"
    return pattern.format(value * factor)


def percent(value):
    return show(value, "{:.1f}%", 100)


def part_of(value, *keys):
    """value[key][key]...; None if a key is missing."""
    for key in keys:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def named(check, name):
    """The figures of a stage; {} if it has none."""
    for stage in check["stages"]:
        if stage["name"] == name:
            return stage["figures"] or {}
    return {}


def workloads(check):
    return list(dict.fromkeys(stage["workload"] for stage in check["stages"] if stage["workload"]))


# ---- sections -------------------------------------------------------------------------------------------------------

def machine(check):
    gpu, libraries = check["gpu"], check["libraries"]
    return Section([
        f"gpu_check {check['part']}: {gpu['name']}, {gpu['memory']}, {gpu['power_limit']}, driver {gpu['driver']}, "
        f"{check['cpus']} CPUs",
        f"CUDA {libraries.get('cuda', '-')}, cuBLASLt {libraries.get('cublas_lt', '-')}, "
        f"revision {check['revision']}, {check['date']}"], 0)


def roofs(check):
    figures = named(check, "roofs")
    found = figures.get("roofs")
    if not found:
        return None
    return Section([f"roofs: device-to-device copy {show(part_of(found, 'copy_gb_per_s'), '{:.0f}')} GB/s, "
                    f"bf16 GEMM {show(part_of(found, 'bf16_tflops'))} TFLOP/s"], 0)


def step_row(key, program, result):
    return (f"  {key:<10} {program:<10} {show(result.get('batch'), '{:.0f}'):>4} "
            f"{show(result.get('seq_len'), '{:.0f}'):>5} {show(result.get('step_ms'), '{:.2f}'):>10} "
            f"{show(result.get('tokens_per_s'), '{:.0f}'):>11} {percent(result.get('mfu')):>7}")


def peer_row(key, row, ours):
    """PyTorch's row, for the same tokens as ours. Uses the eager step if there is no compiled one."""
    compiled = part_of(row, "torch", "step_ms")
    step_ms = compiled or part_of(row, "torch", "eager_ms")
    tokens = (row.get("batch") or 0) * (row.get("seq_len") or 0)
    is_number = isinstance(step_ms, (int, float)) and step_ms > 0
    result = {"batch": row.get("batch"), "seq_len": row.get("seq_len"), "step_ms": step_ms,
              "tokens_per_s": tokens / step_ms * 1000 if is_number else None}
    if is_number and ours.get("mfu") and ours.get("batch") == row.get("batch"):
        result["mfu"] = ours["mfu"] * ours["step_ms"] / step_ms
    kind = "compiled" if compiled and part_of(row, "torch", "compiled") else "eager"
    return (step_row(key, "PyTorch", result) + f"  {kind}, {part_of(row, 'torch', 'attention') or '-'}, "
            f"{show(row.get('ratio'), '{:.3f}')} times our ms")


def steps(check):
    """The figures of the benchmark, the trainer and PyTorch for each workload."""
    rows = []
    for key in workloads(check):
        ours = part_of(named(check, f"step_{key}"), "results", 0) or {}
        for stage in check["stages"]:  # at every batch
            if stage["workload"] == key and stage["name"].startswith("step_"):
                ends = {"_queued": "no graphs", "_tuned": "tuned"}
                program = ends.get(stage["name"][stage["name"].rfind("_"):], "bench")
                rows += [(3, step_row(key, program, result)) for result in part_of(stage["figures"], "results") or []]
        trainer = named(check, f"trainer_{key}")
        if trainer:
            rows.append((3, step_row(key, "train_gpt", trainer) + f"  {show(trainer.get('steps'), '{:.0f}')} steps"))
        for row in part_of(named(check, f"peer_{key}"), "rows") or []:
            rows.append((3, peer_row(key, row, ours)))
    head = "  workload   program       B     T    ms/step    tokens/s     MFU"
    return Section(["", "whole steps, bf16; MFU by llm.c's convention", head], 1, rows) if rows else None


def ops(check, key):
    found = part_of(named(check, f"ops_{key}"), "results", 0, "ops") or []
    if not found:
        return None
    found = sorted(found, key=lambda op: -(op.get("ms_above_roof") or 0))
    rows = [(op.get("ms_above_roof") or 0,
             f"  {op['name'][:34]:<34} {show(op.get('calls'), '{:.0f}'):>5} {show(op.get('total_ms'), '{:.3f}'):>10} "
             f"{percent(op.get('roof_share')):>8} {show(op.get('ms_above_roof'), '{:.3f}'):>10}") for op in found]
    head = f"  {'':<34} {'calls':>5} {'ms/step':>10} {'of roof':>8} {'ms above':>10}"
    return Section(["", f"{key}: ops by milliseconds above the roofline", head], 3, rows)


def matmuls(check, key):
    """The chosen algorithm, the fastest one with a fixed order of sums, and the fastest excluded one. The ratio is the
    excluded one's speed to the chosen one's."""
    rows, extra = [], []
    for one in named(check, f"matmul_{key}").get("products") or []:
        chosen, fastest, excluded = (one.get(kind) or {} for kind in ("chosen", "fastest", "excluded"))
        ms, other = chosen.get("ms"), excluded.get("ms")
        ratio = ms / other if isinstance(ms, (int, float)) and isinstance(other, (int, float)) and other > 0 else None
        if one.get("gelu_ms") and one.get("gelu_pass_ms") and isinstance(ms, (int, float)):
            extra.append(f"  {one['name'][:26]}: with the library's GELU {one['gelu_ms']:.4f} ms; "
                         f"with bias {ms:.4f} ms and our pass {one['gelu_pass_ms']:.4f} ms")
        bad = bool(chosen.get("mismatches"))
        shape = f"{one.get('m')}x{one.get('n')}x{one.get('k')}"
        rows.append(((1e9 if bad else 0) + (one.get("calls") or 1) * (ms or 0),
                     f"  {str(one.get('name'))[:26]:<26} {shape:<18} {show(chosen.get('tflops')):>8} "
                     f"{show(fastest.get('tflops')):>8} {show(excluded.get('tflops')):>9} {show(ratio, '{:.3f}'):>7} "
                     f"{show(chosen.get('mismatches'), '{:.0f}'):>7} {show(excluded.get('mismatches'), '{:.0f}'):>9}"
                     f"  of {show(chosen.get('repeats'), '{:.0f}')}"))
    head = (f"  {'':<26} {'m x n x k':<18} {'TFLOP/s':>8} {'fastest':>8} {'excluded':>9} {'ratio':>7} {'differ':>7} "
            f"{'excluded':>9}")
    title = f"{key}: GEMMs, chosen, fastest and best excluded algorithm, repeats with other bits"
    return Section(["", title, *extra, head], 4, rows) if rows else None


def profiled(check, key):
    """Nsight Compute's figures of kernels, in percent of the peak."""
    rows = [(1, f"  {kernel['name'][:34]:<34} {show(kernel['us']):>9} {show(kernel['tensor']):>9} "
                f"{show(kernel['issue']):>9} {show(kernel['dram']):>9} {show(kernel['conflicts'], '{:.0f}'):>11}")
            for kernel in named(check, f"ncu_{key}").get("kernels") or []]
    head = f"  {'':<34} {'us':>9} {'tensor %':>9} {'issue %':>9} {'memory %':>9} {'conflicts':>11}"
    return Section(["", f"{key}: kernels by Nsight Compute", head], 1, rows) if rows else None


def clocks_of(stage):
    clocks = stage["clocks"] or {}
    sm = "/".join(show(value, "{:.0f}") for value in clocks.get("sm_mhz") or []) or "-"
    watts = "/".join(show(value, "{:.0f}") for value in clocks.get("watts") or []) or "-"
    slow = " [" + ", ".join(clocks["slowdowns"]) + "]" if clocks.get("slowdowns") else ""
    return sm, watts, show(clocks.get("celsius"), "{:.0f}"), slow


def stages(check):
    rows = []
    for stage in check["stages"]:
        sm, watts, celsius, slow = clocks_of(stage)
        rows.append((0 if stage["verdict"] == "passed" else 1,
                     f"  {stage['name']:<23} {stage['verdict']:<17} {show(stage['seconds'], '{:.0f}'):>4} {sm:>14} "
                     f"{watts:>7} {celsius:>3} {slow} {stage['detail']}"))
    head = f"  {'stage':<23} {'verdict':<17} {'s':>4} {'SM MHz':>14} {'W':>7} {'C':>3}"
    return Section(["", "stages; SM clock min/median/max, power median/max, highest temperature", head], 2, rows)


def counts(check):
    """The last line: "gpu_check measure: NOT passed: 9 passed, 1 failed, 1 not run; 312 s"."""
    seen = {}
    for stage in check["stages"]:
        kind = stage["verdict"].split(" (")[0]
        seen[kind] = seen.get(kind, 0) + 1
    verdict = {True: "passed", False: "NOT passed", None: "unfinished"}[check["passed"]]
    return Section(["", f"gpu_check {check['part']}: {verdict}: "
                    + ", ".join(f"{count} {kind}" for kind, count in seen.items())
                    + f"; {check['seconds']:.0f} s"], 0)


def guarded(make, *arguments):
    """Returns a section, or a line with the error if the figures of another program are invalid."""
    try:
        return make(*arguments)
    except Exception as error:
        where = " ".join(str(argument) for argument in arguments[1:])
        return Section([f"({make.__name__} {where}: cannot be shown: {type(error).__name__}: {error})"], 0)


def table(check, limit=MAX_CHARACTERS):
    """The whole table. Never fails because of invalid figures, and never exceeds the limit."""
    sections = [guarded(machine, check), guarded(roofs, check), guarded(steps, check)]
    sections += [guarded(make, check, key) for make in (profiled, ops, matmuls) for key in workloads(check)]
    sections += [guarded(stages, check), guarded(counts, check)]
    return fit([section for section in sections if section], limit)
