"""`pdperf manifests`: a topology as Kubernetes manifests, for a cluster to bring up and `pytest --k8s` to measure."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

EXAMPLES = """\
examples:
  pdperf manifests pd-1p2d-tp2 --model Qwen/Qwen3-32B --image vllm/vllm-openai:v0.32.0
  pdperf manifests pd-1p2d-tp2 --flavour gpustack --accelerator h100 --model Qwen/Qwen3-32B --image IMAGE
afterwards:
  kubectl apply -n llm -f FILE
  pytest tests/perf -m pd --k8s llm --target http://GATEWAY \\
      --k8s-selector prefill=llm-d.ai/role=prefill --k8s-selector decode=llm-d.ai/role=decode
"""


def add(commands: Any) -> None:
    """Register the subcommand."""
    parser = commands.add_parser(
        "manifests",
        help="a topology as Kubernetes manifests",
        description="Prints what brings a topology up in a cluster. Applies nothing.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("topology", help="name of a shipped or your own topology, or a YAML file")
    parser.add_argument(
        "--flavour",
        choices=("llm-d", "gpustack"),
        default="llm-d",
        help="Deployments with llm-d's role labels (default), or roles of a GPUStack ModelDeployment",
    )
    parser.add_argument("--model", required=True, help="what the engines load")
    parser.add_argument("--image", required=True, help="container image with the engine")
    parser.add_argument("--engine", help="vllm or sglang (default: the topology's, else vllm)")
    parser.add_argument("--served-model", help="name that clients use (default: last part of --model)")
    parser.add_argument("--name", help="name of the deployment (default: the topology's)")
    parser.add_argument(
        "--accelerator",
        help="GPU resource of pods (nvidia.com/gpu); for gpustack the accelerator type, required",
    )
    parser.add_argument(
        "--fixtures", type=Path, default=Path("fixtures"), help="folder with your own topologies/"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the documents, notes as comments before them. Raises UsageProblem."""
    import yaml

    from pytest_pdperf.engines.registry import get_engine
    from pytest_pdperf.errors import UsageProblem
    from pytest_pdperf.places.manifests import Order, render
    from pytest_pdperf.spec.loader import find_topologies, shipped_fixtures

    folders = [folder for folder in (arguments.fixtures, shipped_fixtures()) if folder.is_dir()]
    (topology,) = find_topologies([arguments.topology], folders)
    accelerator = arguments.accelerator
    if accelerator is None and arguments.flavour == "gpustack":
        raise UsageProblem(
            "--accelerator is missing: --flavour gpustack wants the cluster's accelerator type"
        )
    order = Order(
        name=arguments.name or topology.name.lower().replace("_", "-").replace(".", "-"),
        model=arguments.model,
        served_model=arguments.served_model or Path(arguments.model).name,
        image=arguments.image,
        accelerator=accelerator or "nvidia.com/gpu",
    )
    engine = get_engine(arguments.engine or topology.engine or "vllm")
    rendered = render(topology, engine, order, arguments.flavour)
    head = f"topology {topology.name}, {arguments.flavour}; not run on a real cluster by this project"
    for note in (head, *rendered.notes):
        sys.stdout.write(f"# {note}\n")

    class Plain(yaml.SafeDumper):
        """Writes equal parts out: anchors are hard to read and harder to edit."""

        def ignore_aliases(self, data: object) -> bool:
            return True

    options: dict[str, Any] = {"sort_keys": False, "explicit_start": True, "width": 1000}
    yaml.dump_all(rendered.documents, sys.stdout, Dumper=Plain, **options)
    return 0
