"""deploy/kubernetes: each document fits its schema, unknown fields refused, and what it says of Muster is true."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from muster._C import _cluster_from_environment, _server
from support.commands import Processes

yaml = pytest.importorskip("yaml", reason="pip install -r requirements-dev.txt brings it")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install -r requirements-dev.txt brings it")
trainer = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install -r requirements-dev.txt brings it")

FOLDER = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes"
VERSION = "1.37"
OF_PACKAGE = {
    "JobSet": trainer.JobsetV1alpha2JobSet,
    "TrainingRuntime": trainer.TrainerV1alpha1TrainingRuntime,
    "TrainJob": trainer.TrainerV1alpha1TrainJob,
}
"""Kinds that are not Kubernetes' own."""
API_VERSIONS = {"jobset": "jobset.x-k8s.io/v1alpha2", "trainer": "trainer.kubeflow.org/v1alpha1"}


def documents() -> list[tuple[str, dict[str, Any]]]:
    return [
        (path.name, document)
        for path in sorted(FOLDER.glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text())
    ]


def check(document: dict[str, Any]) -> None:
    """Raises for what the schema of its kind does not have, or has otherwise."""
    model = OF_PACKAGE.get(document["kind"])
    if model is None:
        kubernetes_validate.validate(document, VERSION, strict=True)
        return
    # The package's models leave out what they do not know.
    known = model.from_dict(document).to_dict()
    assert known == document
    for job in find(document, "replicatedJobs") or []:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, "spec": job["template"]["spec"]}
        kubernetes_validate.validate(whole, VERSION, strict=True)


def find(value: Any, key: str) -> Any:
    """The first value of that key, at any depth."""
    if isinstance(value, dict):
        if key in value:
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            if (found := find(inner, key)) is not None:
                return found
    return None


@pytest.mark.parametrize(("file", "document"), documents(), ids=lambda value: value if isinstance(value, str) else "")
def test_a_document_fits_its_schema(file: str, document: dict[str, Any]) -> None:
    check(document)


@pytest.mark.parametrize("kind", ["Job", "JobSet", "TrainingRuntime", "TrainJob", "PodDisruptionBudget", "Service"])
def test_a_field_that_there_is_not_is_refused(kind: str) -> None:
    document = next(document for _, document in documents() if document["kind"] == kind)
    document["spec"]["invented"] = 1
    with pytest.raises((kubernetes_validate.ValidationError, AssertionError)):
        check(document)


def of_kind(kind: str, file: str | None = None) -> list[dict[str, Any]]:
    return [document for name, document in documents() if document["kind"] == kind and file in (None, name)]


def pods(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The pod templates' specs."""
    jobs = find(document, "replicatedJobs")
    specs = [job["template"]["spec"] for job in jobs] if jobs else [document["spec"]]
    return [spec["template"]["spec"] for spec in specs if "template" in spec and "spec" in spec["template"]]


@pytest.mark.parametrize("kind", ["Job", "JobSet", "TrainingRuntime"])
def test_what_a_pod_names_is_there(kind: str) -> None:
    claims = {claim["metadata"]["name"] for claim in of_kind("PersistentVolumeClaim")}
    for document in of_kind(kind):
        for pod in pods(document):
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            for container in [*pod["initContainers"], *pod["containers"]]:
                assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
            used = {v["persistentVolumeClaim"]["claimName"] for v in volumes.values() if "persistentVolumeClaim" in v}
            assert used <= claims
    budget = of_kind("PodDisruptionBudget")[0]["spec"]["selector"]["matchLabels"]
    assert budget == of_kind("Job", "parameter-servers.yaml")[0]["spec"]["template"]["metadata"]["labels"]


def first_pod(document: dict[str, Any]) -> str:
    """The name under which others reach the pod with index 0: Kubernetes', or JobSet's."""
    name = document["metadata"]["name"]
    if document["kind"] == "Job":
        [service] = of_kind("Service")
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"job-name": name}
        subdomain = document["spec"]["template"]["spec"]["subdomain"]
        assert service["metadata"]["name"] == subdomain
        return f"{name}-0.{subdomain}"
    [job] = document["spec"]["replicatedJobs"]
    return f"{name}-{job['name']}-0-0.{document['spec']['network']['subdomain']}"


@pytest.mark.parametrize("kind", ["Job", "JobSet"])
def test_the_variables_of_a_pod_are_a_place_in_the_job(kind: str) -> None:
    document = of_kind(kind)[0]
    job = document["spec"] if kind == "Job" else document["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    variables = {each["name"]: each.get("value", "") for each in pod["containers"][0]["env"]}
    assert "completion-index" in find(pod["containers"][0]["env"], "fieldPath")
    for rank in range(job["completions"]):
        cluster = _cluster_from_environment(variables | {"RANK": str(rank)})
        assert (cluster.rank, cluster.num_workers, cluster.address) == (
            rank,
            job["completions"],
            f"{first_pod(document)}:29500",
        )
    rules = find(job, "podFailurePolicy")["rules"]
    assert find(rules, "values") == [143]
    assert find(rules, "containerName") == pod["containers"][0]["name"]


def here(command: list[str], folder: Path) -> list[str]:
    """A container's command on this host: its volumes are in `folder`, and Python is this one."""
    command = [re.sub(r"^/(secret|run|snapshots)\b", rf"{folder}/\1", word) for word in command]
    program = {"python": [sys.executable], "muster": [sys.executable, "-m", "muster"]}.get(command[0], command[:1])
    return [*program, *command[1:]]


def test_a_server_beside_the_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sidecar's own commands: its secret, its probe, its end; as root in namespaces such as a container has."""
    [pod] = pods(of_kind("Job", "parameter-servers.yaml")[0])
    secret, server = pod["initContainers"]
    workers = pod["containers"][0]
    for name in ("secret", "run/muster"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "secret" / "secret").write_text("c2VjcmV0IG9mIHRoZSB0ZXN0\n")
    (tmp_path / "secret" / "secret").chmod(0o440)
    subprocess.run(here(secret["command"], tmp_path), check=True)
    monkeypatch.setenv("MUSTER_SECRET_FILE", str(tmp_path / "run" / "muster" / "secret"))
    address = _cluster_from_environment({"MUSTER_SERVERS": find(workers["env"], "value")}).servers[0]

    port = _server.free_address().partition(":")[2]
    server = eval(repr(server).replace("29600", port))
    probe = here(server["readinessProbe"]["exec"]["command"], tmp_path)
    assert probe == here(server["startupProbe"]["exec"]["command"], tmp_path)
    assert subprocess.run(probe, capture_output=True, check=False).returncode != 0
    apart = (
        ["unshare", "--pid", "--ipc", "--uts", "--fork", "--mount-proc", "--kill-child"] if os.geteuid() == 0 else []
    )
    with Processes([*apart, *here(server["command"], tmp_path)]) as running:
        assert running.line() == f"localhost:{port}" == address.replace("29600", port)
        subprocess.run(probe, check=True)
        worker = _server.Probe([_server.channel_name(f"localhost:{port}")], 1000)
        worker.step()
        worker.leave()
        os.kill(max(running.processes("serve")), signal.SIGTERM)  # of unshare and its child, the child
        assert running.end()[0] == 0
    assert list((tmp_path / "snapshots" / "server-0").glob("snapshot-*"))
