"""Files for other runtimes: ONNX and torch.export programs, each read back and compared before it counts as written."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rankwise.core.disk import alone, make_folder, remove, rename, write_part
from rankwise.errors import RankwiseError, need, out_of_memory
from rankwise.surgery.forward import Example, run_example, tensors_of, undisturbed
from rankwise.timing.clock import Timing, inputs_for

TARGETS = {"onnx": "model.onnx", "exported": "model.pt2"}
CLOSE = 1e-3  # largest difference of an output from PyTorch's, relative to its largest entry


def export(model: nn.Module, example: Example, path: str | Path, to: str = "onnx") -> dict[str, Any]:
    """Write the model as an ONNX file or a torch.export program for batches of any size.

    The file is opened again and its outputs are compared with the model's own, for two batch sizes, before it gets its
    name. Where a network insists on one batch size, the example's, only that is exported.

    Args:
        model: the network, compressed or not.
        example: an input.
        path: the file to write.
        to: "onnx" or "exported".

    Returns:
        A dict of what was compared: path, bytes, batches, and the largest relative difference.

    >>> import tempfile, torch, rankwise as rw
    >>> from torch import nn
    >>> found = rw.export(nn.Linear(4, 2), torch.randn(1, 4), tempfile.mkdtemp() + "/model.pt2", to="exported")
    >>> found["batch"], found["difference"] < 1e-6
    ('any', True)
    """
    if to not in TARGETS:
        raise RankwiseError(f"export to {to!r} was asked for: possible are {', '.join(TARGETS)}")
    path = Path(path)
    part = path.parent / f"{path.stem}.part{path.suffix or Path(TARGETS[to]).suffix}"
    try:
        make_folder(path.parent)
        with _writing(part, path), undisturbed(model), _without_cache(model), _quiet():
            batches, why = _write(model, example, part, to)
            worst = max(_compare(model, example, part, to, batch) for batch in batches)
    except OSError as err:
        raise RankwiseError(f"{path} could not be written ({err.strerror or err}): check the folder") from None
    found = {"path": str(path), "to": to, "bytes": path.stat().st_size, "batches": batches, "difference": worst}
    return {**found, "batch": "any" if why is None else batches[0], **({} if why is None else {"why": why})}


@contextmanager
def _writing(part: Path, path: Path) -> Iterator[None]:
    """Another process that exports to the same file waits. What was written gets its name when nothing was wrong."""
    with alone(path.parent / f"{path.name}.lock"):
        try:
            yield
            rename(part, path)
        finally:
            remove(part)


def _write(model: nn.Module, example: Example, path: Path, to: str) -> tuple[list[int], str | None]:
    """The batch sizes to compare, and why there is only one if that is so."""
    own = _batch_of(example)
    first = max(2, own)  # traced with one input, a network may take every batch for one
    try:
        write_part(path, CONTENTS[to](model, *_inputs(model, example, first), True))
        return [first, first + 1], None
    except (RankwiseError, OSError):  # another batch size would help nothing
        raise
    except Exception as err:
        if out_of_memory(err):
            raise MemoryError(_line(err)) from err
        try:
            write_part(path, CONTENTS[to](model, *_inputs(model, example, own), False))
        except Exception as again:
            if out_of_memory(again):
                raise MemoryError(_line(again)) from again
            raise RankwiseError(
                f"the network cannot be exported to {to} ({type(again).__name__}: {_line(again)}): ask torch.export"
            ) from again
        return [own], _line(err)


def _exported(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool) -> memoryview:
    # Through memory: where the disk is full, torch ends the process instead of raising.
    content = BytesIO()
    torch.export.save(_program(model, args, kwargs, dynamic), content)
    return content.getbuffer()


def _onnx(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool) -> bytes:
    for package in ("onnx", "onnxscript", "onnxruntime"):
        need(package, extra="export", purpose="an ONNX file")
    program = torch.onnx.export(_program(model, args, kwargs, dynamic), dynamo=True, verbose=False, optimize=True)
    if program is None:
        raise RankwiseError("torch wrote no ONNX program: update torch")
    return bytes(program.model_proto.SerializeToString())


CONTENTS: dict[str, Callable[..., bytes | memoryview]] = {"onnx": _onnx, "exported": _exported}


def _program(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic: bool) -> Any:
    batch = torch.export.Dim.DYNAMIC

    def shape(value: Any) -> Any:
        return {0: batch} if isinstance(value, Tensor) and value.ndim else None

    # Arguments by position and by name, as torch.export wants them: one entry for each, in order.
    shapes = None
    if dynamic:
        shapes = {k: shape(v) for k, v in kwargs.items()} if kwargs else tuple(map(shape, args))
    return _without_traces(torch.export.export(model, args, kwargs, dynamic_shapes=shapes, strict=False))


def _without_traces(program: Any) -> Any:
    """torch notes for every operation the files and the lines of code it came from: they are not to be given away."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return program


def open_exported(path: str | Path, to: str) -> Any:
    """A function from inputs to a list of output tensors, out of a file that `export` wrote."""
    if to == "exported":
        module = torch.export.load(path).module()
        return lambda args, kwargs: tensors_of(module(*args, **kwargs))
    session = open_onnx(path)
    names = [given.name for given in session.get_inputs()]

    def run(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        given = [v.numpy() for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
        return [torch.from_numpy(out) for out in session.run(None, dict(zip(names, given, strict=True)))]

    return run


def open_onnx(path: str | Path, threads: int = 0) -> Any:
    runtime = need("onnxruntime", extra="export", purpose="ONNX Runtime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def _compare(model: nn.Module, example: Example, path: Path, to: str, batch: int) -> float:
    """The largest relative difference between the file's outputs and the model's; an error where that is large."""
    args, kwargs = _inputs(model, example, batch)
    wanted = tensors_of(run_example(model, kwargs or args))
    given = _outputs_of(path, to, args, kwargs)
    if [t.shape for t in wanted] != [t.shape for t in given]:
        raise RankwiseError(f"the export to {to} gives outputs of other shapes than the network: it was not kept")
    gaps = [_gap(a, b) for a, b in zip(wanted, given, strict=True) if a.numel()]
    worst = max(gaps, default=0.0)
    if not worst <= CLOSE:
        raise RankwiseError(
            f"the export to {to} gives other outputs than the network (by {worst:.1e}): it was not kept"
        )
    return worst


def _outputs_of(path: Path, to: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    try:
        outputs: list[Tensor] = open_exported(path, to)(args, kwargs)
        return outputs
    except OSError:
        raise
    except Exception as err:
        if out_of_memory(err):
            raise MemoryError(_line(err)) from err
        raise RankwiseError(
            f"the export to {to} could not be opened again ({type(err).__name__}: {_line(err)}): it was not kept"
        ) from err


def _gap(wanted: Tensor, given: Tensor) -> float:
    a, b = wanted.detach().double(), given.detach().double()
    return float((a - b).abs().max() / a.abs().max().clamp_min(1e-12))


def _inputs(model: nn.Module, example: Example, batch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The example in another batch size; inputs differ from each other, or a mix-up would not show."""
    args, kwargs = inputs_for(model, example, Timing(batch=batch))
    random = torch.Generator().manual_seed(0)

    def vary(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
            noise = torch.randn(value.shape, generator=random, dtype=torch.float32)
            return value + 0.1 * noise.to(value) * value.abs().mean().clamp_min(0.1)
        return value

    return tuple(map(vary, args)), {k: vary(v) for k, v in kwargs.items()}


def _batch_of(example: Example) -> int:
    values = (
        example.values()
        if isinstance(example, Mapping)
        else example
        if isinstance(example, tuple | list)
        else [example]
    )
    return next((len(v) for v in values if isinstance(v, Tensor) and v.ndim), 1)


@contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """A network of transformers gives its outputs alone: a cache of keys and values is no tensor to be exported."""
    config: Any = getattr(model, "config", None)
    if not isinstance(getattr(config, "use_cache", None), bool):
        yield
        return
    before, config.use_cache = config.use_cache, False
    try:
        yield
    finally:
        config.use_cache = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters talk a lot; what matters is an exception or the comparison."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _line(err: BaseException) -> str:
    return (str(err).strip().splitlines() or [type(err).__name__])[0]
