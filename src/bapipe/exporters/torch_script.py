"""Export for torch.distributed.pipelining: a script that needs torch and the model's own code, not BaPipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from bapipe.costs.optimizers import parse_optimizer
from bapipe.errors import BaPipeError
from bapipe.exporters.export_text import Export, Job, commented, header_lines, python_lists
from bapipe.exporters.losses import find_losses
from bapipe.exporters.module_stages import stage_beginnings
from bapipe.exporters.plan_features import torch_order
from bapipe.schedule.schedule_file import to_torch_csv

__all__ = ["write_torch"]

_OPTIMIZERS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "sgd": ("torch.optim:SGD", {}),
    "momentum": ("torch.optim:SGD", {"momentum": 0.9}),
    "adam": ("torch.optim:Adam", {}),
    "adamw": ("torch.optim:AdamW", {}),
}
"""by the plan's name -> class and options"""

_BODY = '''

def build(seed):
    """The model, its make_batch(seed, size) and its loss(output, target)."""
    for folder in (os.path.dirname(os.path.abspath(__file__)), os.getcwd()):
        sys.path.insert(0, folder)
    name, _, function = MODEL.partition(":")
    source = importlib.import_module(name)
    torch.manual_seed(seed)
    built = getattr(source, function)(**ARGUMENTS)
    module = built[0] if isinstance(built, (tuple, list)) else built
    for needed in ("make_batch", "loss"):
        if not callable(getattr(source, needed, None)):
            sys.exit(f"{name} needs {needed}: torch.distributed.pipelining computes the loss after the last "
                     "stage, from make_batch(seed, size) -> (inputs, target) and loss(output, target)")
    accepted = inspect.signature(source.make_batch).parameters
    options = {key: value for key, value in ARGUMENTS.items() if key in accepted}
    dtype = getattr(torch, DTYPE) if DTYPE else next(module.parameters()).dtype
    module = module.to(dtype).train()

    def make_batch(seed, size):
        inputs, target = source.make_batch(seed, size, **options)
        inputs = inputs if isinstance(inputs, (tuple, list)) else (inputs,)
        if any(not isinstance(item, torch.Tensor) for item in inputs):
            sys.exit(f"{name}.make_batch must return tensors, or a tuple of them, as inputs of the first stage")
        return tuple(item.to(dtype) if item.is_floating_point() else item for item in inputs), target

    return module, make_batch, source.loss


def cut(module, inputs):
    """The stages, as torch traces and cuts the model."""
    pipe = pipeline(module, mb_args=inputs, split_spec={path: SplitPoint.BEGINNING for path in CUTS})
    if pipe.num_stages != len(CUTS) + 1:
        sys.exit(f"torch made {pipe.num_stages} stages of {len(CUTS) + 1}: a module that a stage begins with is "
                 "not called, or called twice; plan again")
    for node in pipe.split_gm.graph.nodes:
        given = [item.name for item in node.all_input_nodes if item.op == "placeholder"]
        if node.op == "call_module" and not node.target.endswith("_0") and given:
            sys.exit(f"a later stage ({node.target}) reads the model's input {given[0]}, which "
                     "torch.distributed.pipelining gives to the first stage only; use bapipe run")
    return pipe


class TiedGradients:
    """Sums gradients of weights that several stages have: torch copies them to each."""

    def __init__(self, module, stages, device):
        first = {}
        self.names = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self.names[name] = first.setdefault(id(parameter), name)
        self.own = {}
        for stage in stages:
            for name, parameter in stage.submod.named_parameters(remove_duplicate=False):
                self.own.setdefault(self.names.get(name, name), []).append(parameter)
        held = [None] * dist.get_world_size()
        dist.all_gather_object(held, sorted(self.own))
        self.groups = {}
        for name in dict.fromkeys(self.names.values()):
            ranks = [rank for rank, names in enumerate(held) if name in names]
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            if name in self.own and (group or len(self.own[name]) > 1):
                self.groups[name] = group

    def sum(self):
        for name, group in self.groups.items():
            copies = self.own[name]
            grads = [item.grad for item in {id(item): item for item in copies}.values() if item.grad is not None]
            total = sum(grads[1:], grads[0].clone()) if grads else torch.zeros_like(copies[0])
            if group is not None:
                dist.all_reduce(total, group=group)
            for item in copies:
                item.grad = total.clone()


class Reference:
    """The same training in one process, to compare with."""

    def __init__(self, module, loss, rate):
        self.module, self.loss = module, loss
        self.optimizer = make_optimizer(list(module.parameters()), rate)
        self.gradients = self.losses = 0.0
        self.compared = set()

    def compare(self, inputs, target, tied, loss):
        """One step; keeps the largest relative differences."""
        self.optimizer.zero_grad()
        total = 0.0
        for index in range(MICROBATCHES):
            part = slice(index * MICROBATCH, (index + 1) * MICROBATCH)
            value = self.loss(self.module(*(item[part] for item in inputs)), target[part]) / MICROBATCHES
            value.backward()
            total += float(value.detach())
        if loss is not None:
            self.losses = max(self.losses, abs(loss - total) / max(abs(total), 1e-30))
        for name, parameter in self.module.named_parameters():
            for copy in tied.own.get(tied.names[name], ()):
                self.compared.add(id(copy))
                if copy.grad is None or parameter.grad is None:
                    missing = copy.grad is not parameter.grad
                    self.gradients = float("inf") if missing else self.gradients
                    continue
                size = float(parameter.grad.abs().max()) or 1.0
                difference = float((copy.grad.to(parameter.grad.device) - parameter.grad).abs().max())
                self.gradients = max(self.gradients, difference / size)
        self.optimizer.step()


def make_optimizer(parameters, rate):
    module, _, name = OPTIMIZER.partition(":")
    return getattr(importlib.import_module(module), name)(parameters, lr=rate, **OPTIMIZER_OPTIONS)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--check", action="store_true", help="compare losses and gradients with a single process")
    given = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", "1")) != len(ORDER):
        sys.exit(f"the plan has {len(ORDER)} ranks; start torchrun --nproc-per-node {len(ORDER)} {__file__}")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.backends.cuda.matmul.allow_tf32 = TF32
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    module, make_batch, loss = build(given.seed)
    own = sorted({int(re.match(r"[0-9]+", action).group()) for action in ORDER[rank]})
    reference = Reference(copy.deepcopy(module), loss, given.lr) if given.check else None
    pipe = cut(module, make_batch(0, MICROBATCH)[0])
    stages = [pipe.build_stage(index, device) for index in own]
    tied = TiedGradients(module, stages, device)
    schedule = _PipelineScheduleRuntime(stages, MICROBATCHES, loss_fn=loss)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "order.csv")
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(ORDER)
        schedule._load_csv(path)
    parameters = list({id(item): item for stage in stages for item in stage.submod.parameters()}.values())
    optimizer = make_optimizer(parameters, given.lr) if parameters else None
    for step in range(given.steps):
        inputs, target = make_batch(given.seed + 1 + step, MICROBATCH * MICROBATCHES)
        losses = []
        schedule.step(
            *(tuple(item.to(device) for item in inputs) if 0 in own else ()),
            target=target.to(device) if len(CUTS) in own else None,
            losses=losses if len(CUTS) in own else None,
        )
        tied.sum()
        mean = float(torch.stack(losses).detach().mean()) if losses else None
        if mean is not None:
            print(f"step {step}  loss {mean:.9g}", flush=True)
        if reference is not None:
            reference.compare(inputs, target, tied, mean)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    if reference is not None:
        last = f", losses by {reference.losses:.3g}" if len(CUTS) in own else ""
        print(
            f"rank {rank}: gradients of {len(reference.compared)} of {len(parameters)} weights differ by at most "
            f"{reference.gradients:.3g}{last}",
            flush=True,
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''


def write_torch(job: Job) -> Export:
    """The script; `torchrun --nproc-per-node N FILE --steps 10 --check`."""
    plan = job.plan
    losses = find_losses(job)
    if plan.model.ref is None:
        raise BaPipeError(
            f"{plan.model.name} is a table of layers without code to train; profile your model "
            "(`bapipe profile package.module:function`) and plan it"
        )
    cuts = stage_beginnings(plan)
    optimizer = parse_optimizer(plan.optimizer)
    name, options = _OPTIMIZERS.get(optimizer.name.lower(), (optimizer.name, {}))
    options = {**options, **optimizer.options}
    if optimizer.master_weights:
        raise BaPipeError("torch's optimizers have no master weights; plan without --master-weights")
    ranks = plan.schedule.to_schedule().num_ranks
    notes = (
        f"torchrun --nproc-per-node {ranks} {job.out} --steps 10 --check; several nodes as torchrun takes them",
    )
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(plan.dtype)
    rows = [line.split(",") for line in to_torch_csv(torch_order(plan)).splitlines()]
    constants = (
        f"MODEL = {json.dumps(plan.model.ref)}\n"
        f"ARGUMENTS = {plan.model.args!r}\n"
        f"MICROBATCH, MICROBATCHES = {plan.microbatch_size}, {plan.microbatches}\n"
        f"DTYPE, TF32 = {dtype!r}, {plan.dtype == 'tf32'}\n"
        f"OPTIMIZER, OPTIMIZER_OPTIONS = {name!r}, {options!r}\n"
        f"CUTS = {json.dumps(list(cuts), indent=4)}\n"
        '"""the module that each stage but the first begins with"""\n'
        f"ORDER = {python_lists(rows, indent='')}\n"
        '"""what each rank does: stage, F forward, B backward, I and W its two parts, micro-batch"""\n'
    )
    head = commented(header_lines(job, losses, notes))
    imports = (
        '"""Trains the model by torch.distributed.pipelining, cut and ordered as planned."""\n\n'
        "import argparse\nimport copy\nimport csv\nimport importlib\nimport inspect\nimport os\nimport re\n"
        "import sys\nimport tempfile\n\nimport torch\nimport torch.distributed as dist\n"
        "from torch.distributed.pipelining import SplitPoint, pipeline\n"
        "from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime\n\n"
    )
    return Export(files={job.out: head + imports + constants + _BODY}, losses=losses, notes=notes)
